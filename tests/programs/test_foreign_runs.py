"""What lies in a folder that others made is data: nothing in it runs, whichever program reads it."""

import copy
import itertools
import json
import math
import os
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from refusals import call, refuse
from sd_lightning import LatentDiffusion, SamplingOptions, UsageError
from sd_lightning.apps import preflight
from sd_lightning.apps.compared_run import read_run
from sd_lightning.apps.export import ExportRequest, ExportSource, read_model
from sd_lightning.apps.run_spec import RunSpec
from sd_lightning.callbacks.checkpoint.optimizer_change import adopt_settings, configured_groups, keep_states
from sd_lightning.callbacks.checkpoint.trainer_state import RunPosition, read_trainer_state
from sd_lightning.models.loading import read_scheduler
from sd_lightning.models.lora import WEIGHTS_NAME as LORA_NAME
from sd_lightning.storage import checkpoint
from sd_lightning.storage.runs import find_checkpoint
from sd_lightning.storage.tensor_store import ShardedTensors

SMALL = "data.batch_size=8 trainer.limit_val_batches=0 callbacks.samples=null logger=csv trainer.max_steps=1"
NODES = {
    "node": {"_target_": "foreign_payload.run", "_args_": ["x"], "_partial_": False, "_recursive_": True},
    "partial": {"_target_": "foreign_payload.run", "_partial_": True, "_convert_": "all"},
    "text": "foreign_payload.run",
    "secret": "${oc.env:FOREIGN_SECRET}",
    "page": "<script>foreign()</script>",
    "list": [["foreign_payload", "run"]],
}
"""What stands in place of each value; importing `foreign_payload` leaves a trace."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`base`, a pipeline, and `run`, which trains adapters on it; read-only."""
    root = tmp_path_factory.mktemp("foreign")
    LatentDiffusion.build("tiny").save_pretrained(root / "base")
    options = f"model.pretrained={root}/base trainable=lora {SMALL}"
    assert call(f"train {options} output_dir={root}/run") == 0
    return root


@pytest.fixture(autouse=True)
def nothing_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let `foreign_payload` be importable, and fail if anybody has imported it."""
    trace = tmp_path / "trace"
    module = tmp_path / "importable" / "foreign_payload.py"
    module.parent.mkdir()
    module.write_text(
        f"import pathlib\npathlib.Path({str(trace)!r}).touch()\ndef run(*args, **kwargs): ...\nRun = run\n"
    )
    monkeypatch.syspath_prepend(module.parent)
    monkeypatch.setenv("FOREIGN_SECRET", "the-secret")
    monkeypatch.chdir(module.parent)
    yield
    assert not trace.exists() and "foreign_payload" not in sys.modules


class Pickled:
    """Runs when it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return __import__, ("foreign_payload",)


def seal(folder: Path) -> None:
    """Write a checkpoint's checksums anew, as whoever alters it can."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "manifest.json")
    files = {
        path.relative_to(folder).as_posix(): {
            "size": path.stat().st_size,
            "sha256": sha256(path.read_bytes()).hexdigest(),
        }
        for path in paths
    }
    write_manifest(folder, files)


def write_manifest(folder: Path, files: dict[str, Any]) -> None:
    digest = sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps({"sha256": digest, "files": files}))


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every value in a tree; of lists and long dictionaries, of the first three."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for number, (key, inner) in enumerate(items):
        if number < 3 or (isinstance(value, dict) and len(value) < 80):
            yield (*path, key)
            yield from places(inner, (*path, key))


def planted(content: Any, place: tuple[Any, ...], node: Any) -> Any:
    changed = json.loads(json.dumps(content))
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = node
    return changed


def tried(read: Callable[[], Any], where: str) -> str | None:
    """Read; return the message of a refusal. Any other error would be a stack trace for the user."""
    try:
        read()
    except UsageError as error:
        assert "the-secret" not in str(error), where
        return str(error)
    except Exception as error:
        pytest.fail(f"{where}: {type(error).__name__}: {error}")
    return None


def read_pipeline(folder: Path) -> None:
    """What generate, train and dreambooth do with a pipeline."""
    LatentDiffusion.from_pretrained(folder).pipeline()
    SamplingOptions().check_steps(read_scheduler(folder / "scheduler/scheduler_config.json").config)


def read_deferred(folder: Path) -> None:
    """What train does before its engine is set up, and plan does."""
    LatentDiffusion.from_pretrained(folder, deferred=["all"])
    LatentDiffusion.describe(folder)


def read_export(folder: Path) -> None:
    from contextlib import ExitStack

    with ExitStack() as opened:
        read_model(ExportSource(folder), ExportRequest(str(folder)), opened)


READERS = (read_pipeline, read_deferred, read_export)
ADOPTED = ("pretrained", "revision", "variant", "vae")
OF_PIPELINE = (
    "model_index.json",
    "unet/config.json",
    "vae/config.json",
    "text_encoder/config.json",
    "scheduler/scheduler_config.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer/tokenizer.json",
)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_PIPELINE)
def test_no_value_of_a_pipelines_file_runs(name: str, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(made / "run/pipeline", folder)
    content = json.loads((folder / name).read_text())
    found = list(places(content))
    assert len(found) > 5
    for number, place in enumerate(found):
        kind, read = list(NODES)[number % len(NODES)], READERS[number // len(NODES) % len(READERS)]
        (folder / name).write_text(json.dumps(planted(content, place, NODES[kind])))
        tried(partial(read, folder), f"{name} {place} {kind} {read.__name__}")


def test_no_value_of_a_runs_settings_is_built(made: Path, compose: Callable[..., Any], tmp_path: Path) -> None:
    """A run that is resumed, and one that is compared, gives plain text or a message with file and key."""
    run = tmp_path / "run"
    shutil.copytree(made / "run", run, copy_function=os.link)
    spec = RunSpec.of(compose("train", f"resume={run}", "trainable=lora"))
    content = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").unlink()
    for number, place in enumerate(places(content)):
        name = ".".join(map(str, place))
        for kind in NODES if place[0] == "model" else [list(NODES)[number % len(NODES)]]:
            (run / "config.yaml").write_text(json.dumps(planted(content, place, NODES[kind])))  # JSON is YAML
            adopted: list[dict[str, str | None]] = []
            said = tried(lambda: adopted.append(preflight.adopted(spec)[0]), f"{name} {kind}")  # noqa: B023
            tried(lambda: read_run(run, "run"), f"compare {name} {kind}")
            if name.removeprefix("model.") in ADOPTED and kind not in ("text", "page"):
                assert said is not None and str(run / "config.yaml") in said and name in said, f"{name} {kind}: {said}"
            for key, value in adopted[0].items() if adopted else ():
                assert key.removeprefix("model.") in ADOPTED and isinstance(value, str)


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("!!python/object/apply:os.mkdir [trace]", id="python tag"),
        pytest.param("!!python/name:foreign_payload.run", id="python name"),
        pytest.param("{a: &a [1], b: *a}", id="alias"),
        pytest.param("[" * 200_000, id="brackets"),
        pytest.param("[a, list]", id="list"),
        pytest.param("model: [a, list]", id="model is a list"),
        pytest.param("model: {pretrained: {a: b}}", id="pretrained is a mapping"),
    ],
)
def test_settings_that_are_none_are_refused(
    text: str, made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run, copy_function=os.link)
    (run / "config.yaml").unlink()
    (run / "config.yaml").write_text(text)
    refuse(f"train resume={run} trainable=lora output_dir={tmp_path}/new", ("config.yaml",), tmp_path, capfd)


def test_a_pickle_named_in_a_runs_settings_is_not_read(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run, copy_function=os.link)
    (run / "payload.pkl").write_bytes(pickle.dumps(Pickled()))
    content = yaml.safe_load((run / "config.yaml").read_text())
    content["model"]["revision"] = {"_target_": "pandas.read_pickle", "filepath_or_buffer": str(run / "payload.pkl")}
    (run / "config.yaml").unlink()
    (run / "config.yaml").write_text(yaml.safe_dump(content))
    words = (f"{run}/config.yaml", "model.revision", "expected plain text")
    refuse(f"train resume={run} trainable=lora output_dir={tmp_path}/new", words, tmp_path, capfd)


def test_data_of_others_are_not_built_to_evaluate_a_run(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    shutil.copytree(made / "run", run, copy_function=os.link)
    victim.mkdir()
    content = yaml.safe_load((run / "config.yaml").read_text())
    nodes = [
        NODES["node"],
        {"_target_": "os.mkdir", "path": str(tmp_path / "new")},
        {"_target_": "sd_lightning.storage.runs.shutil.rmtree", "path": str(victim)},
        {"_target_": "sd_lightning.storage.runs.delete_written", "run_dir": str(victim)},
        {**content["data"], "caption_prefix": NODES["secret"]},
        {**content["data"], "num_val_samples": NODES["partial"]},
        {**content["data"], "_args_": [[{"deep": NODES["node"]}]]},
        {"train_data_dir": "x"},
        NODES["text"],
        NODES["list"],
        7,
    ]
    for node in nodes:
        (run / "config.yaml").unlink()
        (run / "config.yaml").write_text(json.dumps({**content, "data": node}))
        words = ("no config.yaml that names data of this package", "data", "add data=images data.train_data_dir=")
        assert "the-secret" not in refuse(f"evaluate run={run}", words, tmp_path, capfd)
    for text, problem in (("[" * 200_000, "nested too deeply"), ("[a, list]", "expected a dictionary")):
        (run / "config.yaml").write_text(text)
        refuse(f"evaluate run={run}", (str(run / "config.yaml"), problem), tmp_path, capfd)


def test_an_objective_of_others_is_not_built_to_evaluate_a_run(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(made / "run", run, copy_function=os.link)
    content = yaml.safe_load((run / "config.yaml").read_text())
    ours = content["objective"]
    for objective in (
        NODES["node"],
        {**ours, "snr_gamma": NODES["node"]},
        {**ours, "shift": NODES["secret"]},
        "a text",
    ):
        (run / "config.yaml").unlink()
        (run / "config.yaml").write_text(json.dumps({**content, "objective": objective}))
        assert call(f"evaluate run={run} num_samples=10 num_inference_steps=1 device=cpu") == 0
        out = capfd.readouterr().out
        assert "the caption gap is not measured with objective." in out and "the-secret" not in out


def resumed(saved: dict[str, Any], content: dict[str, Any]) -> None:
    """Do what a resumed run does with a state before it loads tensors, with another learning rate and optimizer."""
    groups = configured_groups(copy.deepcopy(content["optimizer_groups"]))
    for optimizer in groups:
        for group in optimizer:
            group["lr"] = 0.5
    RunPosition(**saved["position"])
    keep_states(saved, ["SGD"] * len(groups), groups)
    adopt_settings(saved, groups)


def test_no_value_of_a_checkpoints_state_runs(made: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    shutil.copytree(checkpoint.newest_valid(made / "run"), path)  # type: ignore[arg-type]
    content = json.loads((path / "trainer.json").read_text())
    for number, place in enumerate(places(content)):
        kind = list(NODES)[number % len(NODES)]
        (path / "trainer.json").write_text(json.dumps(planted(content, place, NODES[kind])))
        said = tried(lambda: read_trainer_state(path), f"{place} {kind}")
        if place[0] == "position":
            assert said is not None and "trainer.json: position" in said
    values: list[Any] = [None, -1, 10**400, math.nan, "", [], [[None]], {}, True]
    for number, (place, value) in enumerate(itertools.product(places(content), values)):
        if number % 4 == 0:  # each place with two values or three, each value at a quarter of the places
            (path / "trainer.json").write_text(json.dumps(planted(content, place, value)))
            tried(lambda: resumed(read_trainer_state(path), content), f"{place} {value}")
    for name in ("manifest.json", "state/index.json"):
        content = json.loads((path / name).read_text())
        for number, place in enumerate(places(content)):
            kind = list(NODES)[number % len(NODES)]
            (path / name).write_text(json.dumps(planted(content, place, NODES[kind])))
            if name == "manifest.json":
                assert checkpoint.verify(path), f"{place} {kind}"
            else:
                tried(lambda: ShardedTensors(path / "state").keys(), f"{place} {kind}")


@pytest.mark.slow
def test_programs_ignore_nodes_beside_every_value(made: Path, tmp_path: Path) -> None:
    """With `_target_` and its like in every mapping of every file, everything is read and nothing built."""
    run = tmp_path / "run"
    shutil.copytree(made / "run", run)
    extra = {**NODES["node"], "_convert_": "all", "secret": NODES["secret"], "page": NODES["page"]}

    def beside(value: Any, where: str = "") -> Any:
        if isinstance(value, list):
            return [beside(each, where) for each in value]
        if not isinstance(value, dict):
            return value
        inner = {key: beside(each, f"{where}.{key}") for key, each in value.items()}
        is_strict = where.startswith((".position", ".trained_parts", ".parameters", ".id2label")) or "$type" in value
        return inner if is_strict else {**extra, **inner}

    trained = next((run / "checkpoints").iterdir())
    known = ("manifest.json", "tokenizer.json", "index.json")
    for file in [each for each in run.rglob("*.json") if each.name not in known]:
        file.write_text(json.dumps(beside(json.loads(file.read_text()))))
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(json.dumps(beside(config)))  # JSON is YAML
    seal(trained)
    shutil.copytree(run, tmp_path / "other")
    out, two_steps = f"output_dir={tmp_path}", SMALL.replace("max_steps=1", "max_steps=2")
    assert call(f"train resume={run} trainable=lora {two_steps} {out}/resumed") == 0
    assert call(f"train init_from={run} {SMALL} {out}/from") == 0
    assert call(f"generate run={run} prompts=[a] num_inference_steps=1 {out}/drawn") == 0
    assert call(f"export run={run} merge_lora=true {out}/exported") == 0
    assert call(f"compare {run} {tmp_path}/other output={tmp_path}/compare.html") == 0
    assert (
        call(f"plan model=tiny model.pretrained={run}/pipeline gpu=t4 strategy=single output={tmp_path}/plan.html") == 0
    )
    pages = [file.read_text() for file in tmp_path.rglob("*.html")]
    assert len(pages) >= 3 and not any("<script>foreign" in page or "the-secret" in page for page in pages)


def brackets(file: Path) -> None:
    file.write_text("[" * 200_000)


def with_keys(**values: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        file.write_text(json.dumps({**json.loads(file.read_text()), **values}))

    return change


def a_pickle(file: Path) -> None:
    """Exchange weights for a pickle that an index names."""
    file.unlink()
    pickled = file.with_name("pytorch_model.bin")
    pickled.write_bytes(pickle.dumps(Pickled()))
    index = {"metadata": {}, "weight_map": {"a": pickled.name}}
    file.with_name(f"{file.name}.index.json").write_text(json.dumps(index))


def only_a_pickle(file: Path) -> None:
    """What older releases of the libraries saved, whole and with an index."""
    file.unlink()
    name = "pytorch_model.bin" if file.name == "model.safetensors" else "diffusion_pytorch_model.bin"
    file.with_name(name).write_bytes(pickle.dumps(Pickled()))
    file.with_name(f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": {"a": name}}))


def elsewhere(file: Path) -> None:
    """Let an index name a file of another folder, which has the same name."""
    file.with_name(f"{file.name}.index.json").write_text(json.dumps({"weight_map": {"a": f"../../{file.name}"}}))


def huge_header(file: Path) -> None:
    """40 GiB of header, in a file that takes no room."""
    length = 40 * 2**30
    file.unlink()
    with open(file, "wb") as handle:
        handle.write(length.to_bytes(8, "little"))
        handle.truncate(length + 8)


def deep_header(file: Path) -> None:
    file.unlink()
    file.write_bytes((200_000).to_bytes(8, "little") + b"[" * 200_000)


def adapters_beside(file: Path) -> None:
    """Adapters that transformers would load, from a pickle."""
    config = {"peft_type": "LORA", "base_model_name_or_path": "foreign/repository"}
    file.with_name("adapter_config.json").write_text(json.dumps(config))
    file.with_name("adapter_model.bin").write_bytes(pickle.dumps(Pickled()))


def lora_settings(**values: Any) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        with safe_open(file, "pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}
            settings = json.loads(opened.metadata()["lora_adapter_metadata"])
        settings |= {f"unet.{key}": value for key, value in values.items()}
        file.unlink()
        save_file(tensors, file, {"lora_adapter_metadata": json.dumps(settings)})

    return change


def other_metadata(file: Path) -> None:
    with safe_open(file, "pt") as opened:
        tensors = {key: opened.get_tensor(key) for key in opened.keys()}
    file.unlink()
    save_file(tensors, file, {"lora_adapter_metadata": "[" * 200_000})


UNET, TEXT, LORA = "unet/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors", LORA_NAME
ATTACKS = [
    *[(name, brackets, "nested too deeply") for name in OF_PIPELINE[:6]],
    ("model_index.json", with_keys(_class_name=["foreign_payload", "Run"]), "expected"),
    ("model_index.json", with_keys(unet=["foreign_payload", "Run"]), "names foreign_payload.Run as unet"),
    ("model_index.json", with_keys(unet={"_target_": "foreign_payload.run"}), "as unet"),
    ("scheduler/scheduler_config.json", with_keys(_class_name="foreign_payload"), "_class_name is 'foreign_payload'"),
    ("scheduler/scheduler_config.json", with_keys(num_train_timesteps=NODES["node"]), "num_train_timesteps={"),
    ("scheduler/scheduler_config.json", with_keys(_class_name="AutoModel"), "_class_name is 'AutoModel'"),
    ("scheduler/scheduler_config.json", with_keys(_class_name=None), "_class_name is None"),
    ("unet/config.json", with_keys(quantization_config={"quant_method": "torchao", "x": NODES["node"]}), "torchao"),
    ("text_encoder/config.json", with_keys(quantization_config=NODES["node"]), "quantization_config"),
    ("text_encoder/config.json", with_keys(auto_map={"AutoModel": "foreign_payload.Run"}), "auto_map"),
    (
        "unet/config.json",
        with_keys(quantization_config={"quant_method": "aqlm", "format": "sd_lightning_int8"}),
        "aqlm",
    ),
    ("tokenizer/tokenizer_config.json", with_keys(vocab_file="../../secret"), "vocab_file names code or files"),
    ("text_encoder/config.json", with_keys(attn_implementation="foreign/kernel"), "attn_implementation=foreign/kernel"),
    ("text_encoder/config.json", with_keys(_attn_implementation={"": "foreign/kernel"}), "_attn_implementation"),
    ("text_encoder/config.json", with_keys(transformers_weights="pytorch_model.bin"), "transformers_weights"),
    ("tokenizer/tokenizer_config.json", with_keys(auto_map={"AutoTokenizer": ["foreign_payload.Run"]}), "auto_map"),
    (TEXT, a_pickle, "names pytorch_model.bin"),
    (UNET, a_pickle, "names pytorch_model.bin"),
    (TEXT, only_a_pickle, "text_encoder"),
    (UNET, only_a_pickle, "unet"),
    (UNET, elsewhere, "names ../../diffusion"),
    (UNET, huge_header, "42,949,672,960 bytes"),
    (TEXT, deep_header, "nested too deeply"),
    (TEXT, adapters_beside, "adapter_config.json"),
    (LORA, lora_settings(megatron_config={}, megatron_core="foreign_payload"), "unet.megatron_core=foreign_payload"),
    (LORA, lora_settings(auto_mapping={"parent_library": "foreign_payload"}), "unet.auto_mapping"),
    (LORA, other_metadata, "metadata"),
    (LORA, huge_header, "42,949,672,960 bytes"),
]


@pytest.mark.parametrize(("name", "change", "words"), ATTACKS, ids=[f"{name} {words}" for name, _, words in ATTACKS])
def test_what_would_run_or_lead_elsewhere_is_refused_by_its_file(
    name: str, change: Callable[[Path], None], words: str, made: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "pipeline"
    shutil.copytree(made / "run/pipeline", folder)
    change(folder / name)
    said = tried(lambda: read_pipeline(folder), "from_pretrained")
    assert said is not None and words in said and str(folder) in said, said
    deferred = tried(lambda: LatentDiffusion.from_pretrained(folder, deferred=["all"]), "deferred")
    assert deferred is not None and words in deferred, deferred


@pytest.mark.parametrize("name", ["manifest.json", "trainer.json", "state/index.json"])
def test_brackets_in_a_checkpoint_are_told(name: str, made: Path, tmp_path: Path) -> None:
    path = tmp_path / "step-00000001"
    shutil.copytree(made / "run/checkpoints/step-00000001", path)
    (path / name).unlink()
    brackets(path / name)
    read = {
        "manifest.json": lambda: find_checkpoint(str(path), tmp_path),
        "trainer.json": lambda: read_trainer_state(path),
        "state/index.json": lambda: ShardedTensors(path / "state"),
    }
    said = tried(read[name], name)
    assert said is not None and "nested too deeply" in said


@pytest.mark.parametrize(
    ("place", "target"), [("../outside", None), ("/dev/zero", None), ("linked", "/dev/zero")], ids=str
)
def test_a_checkpoint_has_no_files_but_its_own(place: str, target: str | None, made: Path, tmp_path: Path) -> None:
    """A device that never ends would be read forever."""
    path = tmp_path / "step-00000001"
    shutil.copytree(made / "run/checkpoints/step-00000001", path)
    (tmp_path / "outside").write_text("")
    if target is not None:
        (path / place).symlink_to(target)
    files = json.loads((path / "manifest.json").read_text())["files"]
    write_manifest(path, {**files, place: {"size": 0, "sha256": sha256(b"").hexdigest()}})
    assert checkpoint.verify(path) == [f"{place} is no file of the checkpoint"]


def test_shards_of_the_state_lie_beside_their_list(made: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    shutil.copytree(made / "run/checkpoints/step-00000001/state", state)
    index = json.loads((state / "index.json").read_text())
    next(iter(index.values()))["pieces"][0]["file"] = "../shard.safetensors"
    (state / "index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match="names ../shard.safetensors, which is not beside it"):
        ShardedTensors(state)


def test_a_link_in_the_place_of_the_settings_is_replaced_and_not_followed(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, outside = tmp_path / "run", tmp_path / "profile"
    shutil.copytree(made / "run", run, copy_function=os.link)
    outside.write_text((run / "config.yaml").read_text())
    before = outside.read_text()
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(outside)
    two_steps = SMALL.replace("max_steps=1", "max_steps=2")
    assert call(f"train output_dir={run} resume=auto trainable=lora {two_steps}") == 0
    assert outside.read_text() == before and not (run / "config.yaml").is_symlink()
