"""The command line: what it composes, what it passes on, and the one line it says about a mistake."""

import logging
import os
import re
import subprocess
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from omegaconf import DictConfig, OmegaConf

from sd_lightning import _conf, _imports
from sd_lightning._conf import cli, command_line
from sd_lightning._conf.annotations import describe, example, fits
from sd_lightning._errors import UsageError

CONFIGS = {
    "conf/train.yaml": """
        defaults: [{model: tiny}, {data: digits}, _self_,
                   {override hydra/job_logging: none}, {override hydra/hydra_logging: none}]
        lr: 1e-3
        seed: 0
        hydra: {run: {dir: .}, sweep: {dir: runs/multirun, subdir: .}, output_subdir: null}
    """,
    "conf/generate.yaml": "prompts: []",
    "conf/torn.yaml": "a: [1",
    "conf/model/tiny.yaml": "{_target_: conf_things.Model, channels: [1, 2], lr: '${lr}', optimizer: null}",
    "conf/model/large.yaml": "{_target_: conf_things.Model, channels: '???'}",
    "conf/data/digits.yaml": "{_target_: conf_things.digits_data, batch_size: 64}",
    "conf/data/images.yaml": "{_target_: conf_things.digits_data, batch_size: 8, root: '${oc.env:IMAGE_ROOT}'}",
    "user/unclosed.yaml": "{defaults: [train, _self_], name: '${foo'}",
    "user/mine.yaml": "{defaults: [train, _self_], seed: 7}",
    "user/experiment/quick.yaml": "# @package _global_\nseed: 9",
    "user/experiment/generate_quick.yaml": "# @package _global_\nseed: 9",
    "user/experiment/exported.yaml": "# @package _global_\n# then: python -m sd_lightning.export run=runs/x\nseed: 9",
    "user/experiment/drawn.yaml": "# @package _global_\n# python -m sd_lightning.generate experiment=drawn\nseed: 9",
    "user/model/wide.yaml": "{_target_: conf_things.Model, channels: [9]}",
}


@dataclass(frozen=True)
class Objective:
    kind: str = "epsilon"


class Model:
    def __init__(
        self,
        channels: list[int],
        lr: float = 1e-3,
        kind: Literal["conv", "linear"] = "conv",
        optimizer: "Callable[..., Any] | None" = None,
        objective: "Undefined | None" = None,  # type: ignore[name-defined] # noqa: F821
    ) -> None:
        self.channels, self.lr, self.kind = channels, lr, kind
        self.optimizer, self.objective = optimizer, objective


def digits_data(*, batch_size: int, root: Path | None = None, cache_latents: bool = True) -> dict[str, Any]:
    if batch_size == 13:
        raise UsageError("digits_data got batch_size=13;\n expected a lucky number")
    if batch_size == 14:
        raise ValueError("14 is even worse")
    if batch_size == 15:
        raise ZeroDivisionError("a bug")
    return {"batch_size": batch_size, "root": root}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[DictConfig]]:
    """Call `main` of a program "train" with these arguments; return the configurations that its task received."""
    for name, text in CONFIGS.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    things = types.ModuleType("conf_things")
    things.__dict__.update(Model=Model, digits_data=digits_data, number=3)
    monkeypatch.setitem(sys.modules, "conf_things", things)
    for module in (cli, command_line):
        monkeypatch.setattr(module, "config_dir", lambda: str(tmp_path / "conf"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)

    def call(*arguments: str, task: Callable[[DictConfig], int | None] | None = None, **options: Any) -> list[Any]:
        received: list[Any] = []
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        programs = ("train", "dreambooth", "generate", "export")
        _conf.main(_conf.Program("train", task or received.append, programs, **options))
        return received

    return call


MISTAKES = [
    ("data.bach_size=4", "data.bach_size=4: there is no key 'data.bach_size'; write data.batch_size=4"),
    ("batch_size=4", "batch_size=4: there is no key 'batch_size'; write data.batch_size=4"),
    ("modl.lr=1", "modl.lr=1: there is no key 'modl.lr'; write model.lr=1"),
    ("modle=tiny", "modle=tiny: there is no key 'modle'; the nearest is model"),
    ("data.zz=4", "data.zz=4: there is no key 'data.zz'; data has batch_size"),
    ("seed.x=4", "seed.x=4: there is no key 'seed.x'; write seed=4"),
    ("data.cache_latents=true", "there is no key 'data.cache_latents'; write +data.cache_latents=true"),
    ("zzzz=1", "zzzz=1: there is no key 'zzzz'; top-level keys are model, data, lr, seed"),
    ("+sed=1", "+sed=1: there is no key 'sed'; write seed=1"),
    ("++sed=1", "++sed=1: there is no key 'sed'; write seed=1"),
    ("+seed=1", "An item is already at 'seed'. Either remove + prefix: 'seed=1'"),
    ("~sed", "~sed: there is no key 'sed'; the nearest is seed"),
    ("model=foo", "model=foo: there is no such option; available: large, tiny"),
    ("model=tny", "model=tny: there is no such option; available: large, tiny; write model=tiny"),
    ("model@other=tiny", "To append to your default list use +model@other=tiny"),
    ("model=3", "model=3: model is a group of configs; available: large, tiny; write model=large"),
    ("data.batch_size", "'data.batch_size' is no setting: write key=value, e.g. data.batch_size=<value>"),
    ("lr=[1,", "cannot read 'lr=[1,'; expected key=value, with special characters quoted"),
    ("seed=1,2", "seed=1,2: a bare comma is ambiguous; write 'seed=[1,2]' for a list, or add -m to run once per value"),
    (
        "model=tiny,large",
        "model=tiny,large: a bare comma is ambiguous; write 'model=[tiny,large]' for a list, or add",
    ),
    ("hydra.job.name=foo seed=1,2", "error: seed=1,2: a bare comma is ambiguous"),
    ("hydra.job.nmae=foo", "Could not override 'hydra.job.nmae'. To append to your config use +hydra.job.nmae=foo"),
    ("model=[tiny] model.lr=3 seed=1,2", "error: seed=1,2: a bare comma is ambiguous"),
    ("+model.channels.x=1", "Error merging override +model.channels.x=1 Index 'x' (str) is not an int"),
    ("data.batch_size=hello", "data.batch_size=hello: expected int; write data.batch_size=64"),
    ("data.batch_size=6.5", "data.batch_size=6.5: expected int; write data.batch_size=64"),
    ("data.batch_size=true", "data.batch_size=true: expected int; write data.batch_size=64"),
    ("data.batch_size=null", "data.batch_size=null: expected int; write data.batch_size=64"),
    ("data.batch_size=", "data.batch_size=: expected int; write data.batch_size=64"),
    ("data.batch_size='64'", "data.batch_size='\"64\"': expected int; write data.batch_size=64"),
    ("+data.cache_latents=maybe", "data.cache_latents=maybe: expected bool; write data.cache_latents=true"),
    ("lr=abc", "lr=abc: expected float (as model.lr); write lr=0.001"),
    ("model.channels=3", "model.channels=3: expected a list of int; write model.channels=[1,2]"),
    ("model.channels=[1,a]", "model.channels=[1,a]: expected a list of int; write model.channels=[1,2]"),
    ("+model.kind=convv", "model.kind=convv: expected one of conv, linear; write model.kind=conv"),
    ("model.optimizer=adam", "expected something callable (a node with _target_) or null"),
    ("+model.chanels=[3]", "model.chanels: Model has no argument 'chanels'; the nearest is model.channels"),
    ("~model.channels", "model: Model needs channels; give it: +model.channels=<value>"),
    ("model=large", "model.channels has no value and no default; give one: model.channels=<value>"),
    ("model.lr=${lrr}", "model.lr=${lrr}: Interpolation key 'lrr' not found; give model.lr=<value>"),
    (
        "model.channels=['${nope}']",
        "model.channels.0=${nope}: Interpolation key 'nope' not found; give model.",
    ),
    ("model.lr=${lr} lr=${seed} seed=???", "error: seed has no value and no default; give one: seed=<value>"),
    (
        "~lr",
        "model.lr=${lr}: Interpolation key 'lr' not found; do not take lr out: give lr=<value>, or model.lr=",
    ),
    ("data=images", """Environment variable 'IMAGE_ROOT' not found"; give data.root=<value>"""),
    ("lr=???", "lr has no value and no default; give one: lr=<value>"),
    ("model._target_=conf_things.Modle", "conf_things has no 'Modle'; the nearest is conf_things.Model"),
    ("model._target_=conf_things.number", "expected a class or function, got a int"),
    ("model._target_=not_there.X", "model._target_=not_there.X: package 'not_there' is not installed"),
    ("-cn=trian", "available: generate, torn, train; write -cn train"),
    ("-cn=torn", "a config file is no valid YAML: while parsing a flow sequence in"),
    ("-cd=user -cn=unclosed", "command line: no viable alternative at input '${foo'; see --help"),
    ('seed="${foo"', """override seed="${foo" no viable alternative at input '${foo'; see --help"""),
    ("-cd=nowhere", "nowhere' not found"),
    ("--bogus", "command line: unrecognized arguments: --bogus; write settings as key=value"),
    ("--seed=3", "command line: unrecognized arguments: --seed=3; write seed=3, put options such as"),
    ("lr=[a dog's bowl,1]", """quotes for the shell: 'lr=["a dog'"'"'s bowl",1]'"""),
    ("--resolve", "command line: The --resolve flag can only be used in conjunction with --cfg"),
]


@pytest.mark.parametrize(("argument", "message"), MISTAKES, ids=[each for each, _ in MISTAKES])
def test_a_mistake_is_one_line_and_exit_code_2(
    run: Callable[..., list[Any]], capfd: pytest.CaptureFixture[str], argument: str, message: str
) -> None:
    with pytest.raises(SystemExit) as end:
        run(*re.split(r" (?=[-a-z.]+=)", argument), task=lambda cfg: pytest.fail("the task ran"))
    out, err = capfd.readouterr()
    assert end.value.code == 2
    assert message in err
    assert err.startswith("error: ") and err.count("\n") == 1 and not out


def test_task_receives_the_resolved_configuration(run: Callable[..., list[Any]], tmp_path: Path) -> None:
    (cfg,) = run("lr=1e-4", "data.batch_size=8", "--local_rank=3")
    assert cfg == {
        "model": {"_target_": "conf_things.Model", "channels": [1, 2], "lr": 1e-4, "optimizer": None},
        "data": {"_target_": "conf_things.digits_data", "batch_size": 8},
        "lr": 1e-4,
        "seed": 0,
    }
    assert not OmegaConf.is_interpolation(cfg.model, "lr")
    assert {each.name for each in tmp_path.iterdir()} == {"conf", "user"}, "Hydra left files"


def test_1e_3_in_yaml_is_a_float(run: Callable[..., list[Any]]) -> None:
    (cfg,) = run()
    assert isinstance(cfg.lr, float) and cfg.lr == 1e-3


def test_users_own_configs_are_found_beside_ours(run: Callable[..., list[Any]]) -> None:
    (cfg,) = run("--config-dir", "user", "-cn", "mine", "model=wide")
    assert cfg.seed == 7 and cfg.model.channels == [9] and cfg.data.batch_size == 64


def test_users_own_experiments_are_for_any_program_unless_they_name_one(
    run: Callable[..., list[Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("quick", "generate_quick", "exported"):
        (cfg,) = run("--config-dir", "user", f"+experiment={name}")
        assert cfg.seed == 9
    with pytest.raises(SystemExit):
        run("--config-dir", "user", "+experiment=drawn")
    expected = "experiment of generate, not of train; write python -m sd_lightning.generate experiment=drawn"
    assert expected in capfd.readouterr().err


def test_mistake_in_the_users_config_names_his_keys(
    run: Callable[..., list[Any]], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run("--config-dir=user", "--config-name=mine", "model=wide", "model.chanels=1")
    assert "there is no key 'model.chanels'; write model.channels=1" in capfd.readouterr().err


def test_cfg_job_prints_yaml_without_running(run: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--cfg", "job", "seed=5") == []
    printed = OmegaConf.create(capsys.readouterr().out)
    assert printed.seed == 5 and "hydra" not in printed


def test_help_lists_groups(run: Callable[..., list[Any]], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run("--help")
    assert not end.value.code and "model: large, tiny" in capsys.readouterr().out


def test_multirun_runs_every_value_and_gives_each_job_its_own_arguments(run: Callable[..., list[Any]]) -> None:
    seen = []
    run("-m", "seed=1,2", "-cn", "train", task=lambda cfg: seen.append((cfg.seed, sys.argv[1:])))
    assert seen == [(1, ["--config-name=train", "seed=1"]), (2, ["--config-name=train", "seed=2"])]


def test_jobs_of_a_multirun_leave_no_environment_behind(run: Callable[..., list[Any]]) -> None:
    # Lightning's launcher sets LOCAL_RANK in rank 0, by which the next job would wait for others to start its ranks.
    seen = []

    def task(cfg: DictConfig) -> None:
        seen.append(os.environ.get("LOCAL_RANK"))
        os.environ["LOCAL_RANK"] = "0"

    run("-m", "seed=1,2", task=task)
    assert seen == [None, None] and "LOCAL_RANK" not in os.environ


def test_multirun_stops_at_the_first_failure(run: Callable[..., list[Any]], capfd: pytest.CaptureFixture[str]) -> None:
    seen = []

    def task(cfg: DictConfig) -> int:
        seen.append(cfg.seed)
        raise UsageError("no seed is good enough")

    with pytest.raises(SystemExit) as end:
        run("-m", "seed=1,2", task=task)
    assert end.value.code == 2 and seen == [1]
    assert capfd.readouterr().err == "error: no seed is good enough\n"


@pytest.mark.parametrize("before", [None, "1"])
def test_task_and_its_processes_see_no_trace_of_hydra(
    run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    from hydra.core.hydra_config import HydraConfig

    if before:
        monkeypatch.setenv("HYDRA_FULL_ERROR", before)
    seen = []
    run("seed=1", task=lambda cfg: seen.append((os.environ.get("HYDRA_FULL_ERROR"), HydraConfig.initialized())))
    # Lightning starts the other ranks in Hydra's run folder with extra overrides where Hydra is initialized.
    assert seen == [(before, False)]
    assert os.environ.get("HYDRA_FULL_ERROR") == before and sys.argv[1:] == ["seed=1"]


def test_task_logs_to_stderr(run: Callable[..., list[Any]], capfd: pytest.CaptureFixture[str]) -> None:
    run(task=lambda cfg: logging.getLogger("sd_lightning.train").info("seed is %d", cfg.seed))
    assert capfd.readouterr() == ("", "INFO: seed is 0\n")


def test_return_value_is_the_exit_code(run: Callable[..., list[Any]]) -> None:
    with pytest.raises(SystemExit) as end:
        run(task=lambda cfg: 75)
    assert end.value.code == 75


def test_a_bug_keeps_its_type_and_trace(run: Callable[..., list[Any]], capfd: pytest.CaptureFixture[str]) -> None:
    def task(cfg: DictConfig) -> int:
        raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug") as caught:
        run(task=task)
    assert caught.traceback[-1].name == "task" and not capfd.readouterr().err


def test_hydra_full_error_shows_the_trace_of_usage_errors(
    run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(UsageError, match="expected int"):
        run("data.batch_size=x")


def test_given_arguments_need_no_value(run: Callable[..., list[Any]]) -> None:
    (cfg,) = run("model=large", reserved={"model": {"channels"}})
    assert OmegaConf.is_missing(cfg.model, "channels")


@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (["--local_rank=3", "a=1"], ["a=1"]),
        (["a=1", "--local-rank", "3", "b=2"], ["a=1", "b=2"]),
        (["--cfg", "job", "local_rank=1"], ["--cfg", "job", "local_rank=1"]),
    ],
)
def test_launcher_arguments_are_dropped(arguments: list[str], kept: list[str]) -> None:
    assert cli.without_launcher_arguments(arguments) == kept


class Drawable(typing.Protocol): ...


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (int, [3, -1], [True, 3.0, "3", None, [3]]),
        (float, [3, 1e-3], [True, "1e-3", None]),
        (bool, [True], [1, "true", None]),
        (str, ["a", ""], [1, None, ["a"]]),
        (Path, ["a/b", Path("a")], [1, None]),
        (int | None, [None, 1], ["a"]),
        (typing.Optional[str], [None, "a"], [1]),  # noqa: UP045
        (int | Literal["auto"], [1, "auto"], ["other", 1.5]),
        (Literal[1, "a"], [1, "a"], [True, "1"]),
        (list[int], [[], [1, 2]], [1, ["a"], "12", {"a": 1}]),
        (Sequence[str], [["a"]], ["a", [1]]),
        (tuple[int, float], [[1, 2]], [[1], [1, 2, 3], ["a", 1]]),
        (tuple[int, ...], [[], [1, 2]], [["a"]]),
        (dict[str, int], [{}, {"a": 1}], [{"a": "b"}, [1], 1]),
        (Mapping[str, Any], [{"a": None}], ["a"]),
        (Callable[..., Any], [len], ["len", 1, None]),
        (list[Callable[..., Any]], [[{"_target_": "a.b"}]], [["a"]]),
        (Objective, [{"_target_": "x"}, {"kind": "a"}], [None]),
        (Drawable, [None, 1, "a"], []),
        (Any, [None, 1, {}], []),
        (object, [None, 1], []),
    ],
    ids=str,
)
def test_annotation_accepts_what_it_means(hint: Any, good: list[Any], bad: list[Any]) -> None:
    assert [each for each in good if not fits(each, hint)] == []
    assert [each for each in bad if fits(each, hint)] == []


def test_annotations_are_worded_for_people() -> None:
    assert describe(typing.Optional[int]) == "int or null"  # noqa: UP045
    assert describe(Literal["a", "b"] | None) == "one of a, b or null"
    assert describe(tuple[int, int]) == "a list of 2 (int, int)"
    assert describe(list[str] | Path) == "a list of str or a path"


def test_examples_are_what_was_probably_meant() -> None:
    assert example(list[str], "seven", []) == ["seven"] and example(list[str], 3, []) == ["3"]
    assert example(list[str], [3, 4], []) == ["3", "4"] and example(Literal["conv", "linear"], "convv", []) == "conv"
    assert example(int, "many", [None, -1]) == -1 and example(str, True, []) == "name"


def test_check_names_the_path_of_nested_targets() -> None:
    tree: dict[str, Any] = {"callbacks": [{"_target_": f"{__name__}.digits_data"}]}
    with pytest.raises(
        UsageError, match=r"^callbacks\.0: digits_data needs batch_size; give it: \+callbacks\.0\.batch"
    ):
        _conf.check(tree)
    tree = {"callbacks": {"a": {"b": {"_target_": f"{__name__}.Model", "chanels": [1]}}}}
    with pytest.raises(UsageError, match=r"^callbacks\.a\.b\.chanels: Model has no argument 'chanels'; "):
        _conf.check(tree)


def test_partial_may_lack_arguments_but_not_misspell_them() -> None:
    node = {"_target_": f"{__name__}.Model", "_partial_": True, "lr": 1}
    _conf.check(node)
    with pytest.raises(UsageError, match="model.lrr: Model has no argument 'lrr'; the nearest is model.lr"):
        _conf.check({**node, "lrr": 1}, "model")


def test_check_reads_the_signature_behind_lightnings_decorators() -> None:
    node = {"_target_": "lightning.pytorch.Trainer", "max_steps": 10, "precision": "bf16-mixed"}
    _conf.check(node, "trainer")
    with pytest.raises(UsageError, match="Trainer has no argument 'max_step'; the nearest is trainer.max_steps"):
        _conf.check({**node, "max_step": 3}, "trainer")
    with pytest.raises(UsageError, match="^trainer.max_steps=many: expected int; write trainer.max_steps=-1$"):
        _conf.check({**node, "max_steps": "many"}, "trainer")
    with pytest.raises(
        UsageError, match="^trainer.precision=bf16-mixd: expected .*; write trainer.precision=bf16-mixed$"
    ):
        _conf.check({**node, "precision": "bf16-mixd"}, "trainer")


def node(**arguments: Any) -> DictConfig:
    return OmegaConf.create({"model": {"_target_": f"{__name__}.Model", **arguments}}).model


def test_instantiate_builds_plain_containers() -> None:
    model = _conf.instantiate(node(channels=[1, 2]))
    assert type(model.channels) is list and model.channels == [1, 2]
    assert _conf.instantiate(None) is None


def test_instantiate_passes_objects_through_untouched() -> None:
    objective, channels = Objective("flow"), [1]
    model = _conf.instantiate(node(channels="???", kind="linear"), channels=channels, objective=objective)
    assert model.objective is objective and model.channels is channels and model.kind == "linear"


def test_instantiate_keeps_partials_open() -> None:
    build = _conf.instantiate(node(_partial_=True, kind="linear"), lr=3.0)
    assert (build(channels=[4]).lr, build(channels=[4]).kind) == (3.0, "linear")


@pytest.mark.parametrize("kwargs", [{}, {"cache_latents": False}])
@pytest.mark.parametrize(
    ("batch_size", "kind", "message"),
    [
        (13, UsageError, "^digits_data got batch_size=13; expected a lucky number$"),
        (14, UsageError, r"^data: cannot build it with these arguments: 14 is even worse \(ValueError; "),
        (15, UsageError, r"^data: cannot build it .*: a bug \(ZeroDivisionError; given batch_size=15; change them, or"),
    ],
)
def test_instantiate_raises_what_the_target_raised(
    batch_size: int, kind: type[Exception], message: str, kwargs: dict[str, Any]
) -> None:
    cfg = OmegaConf.create({"data": {"_target_": f"{__name__}.digits_data", "batch_size": batch_size}})
    with pytest.raises(kind, match=message) as caught:
        _conf.instantiate(cfg.data, **kwargs)
    assert type(caught.value) is kind


def test_instantiate_names_the_nested_node_that_failed() -> None:
    inner = {"_target_": f"{__name__}.digits_data", "batch_size": 14}
    cfg = OmegaConf.create({"outer": {"_target_": f"{__name__}.Model", "channels": [1], "objective": inner}})
    with pytest.raises(UsageError, match="^outer.objective: cannot build it"):
        _conf.instantiate(cfg.outer)


def test_ctrl_c_is_one_line_and_an_exit_code_of_its_own(
    run: Callable[..., list[DictConfig]], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(cfg: DictConfig) -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as end:
        run(task=interrupt)
    assert end.value.code == 130 and capsys.readouterr().err == "interrupted\n"


def test_config_dir_is_the_checkouts_where_there_is_one(tmp_path: Path) -> None:
    package = tmp_path / "src" / "sd_lightning"
    (package / "conf").mkdir(parents=True)
    assert command_line._config_dir(package) == package / "conf"
    (tmp_path / "conf").mkdir()
    assert command_line._config_dir(package) == package / "conf", "a folder called conf alone is no checkout"
    (tmp_path / "pyproject.toml").touch()
    assert command_line._config_dir(package) == tmp_path / "conf"
    assert Path(_conf.config_dir()).is_absolute()


def test_require_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _imports.require("json", extra="all", who="x").loads("1") == 1
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    expected = r"^strategy=deepspeed: package 'deepspeed' is not installed; .*pip install 'sd-lightning\[deepspeed\]'$"
    with pytest.raises(UsageError, match=expected):
        _imports.require("deepspeed", extra="deepspeed", who="strategy=deepspeed")


def test_optional_target_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UsageError, match=r"logger._target_=wandb.X: .*pip install 'sd-lightning\[loggers\]'"):
        _conf.check({"_target_": "wandb.X"}, "logger")


def test_importing_the_package_does_not_import_hydra() -> None:
    code = "import sys, sd_lightning._conf; print({'hydra', 'omegaconf', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
