"""`data.encoders=ray`: the batches and losses of encoders on a cluster, however many there are and whichever die."""

import asyncio
import csv
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray as ray_module
import torch
from ray import cloudpickle

import small_training as small
from encoder_jobs import Call, Waiting, digits, fit, waiting_loader
from ranks import run_jobs_of_all
from ray_training import Training, weights
from sd_lightning import SDDataModule, train
from sd_lightning._errors import UsageError
from sd_lightning.data.builders import digits_data
from sd_lightning.data.loading import LoaderOptions
from sd_lightning.data.sources.digits import Digits
from sd_lightning.models.encoder import LatentEncoder
from sd_lightning.models.latent_diffusion import LatentDiffusion
from sd_lightning.remote import encoders
from sd_lightning.remote.encoder_pool import EncoderPool, packed, usage_error
from sd_lightning.remote.encoders import EncodedLoader, RayEncoders, resize
from square_data import Squares
from suites import keep


def processes(ray: Any, loaders: RayEncoders) -> dict[int, int]:
    """Return the process of every encoder, by its number."""
    members = ray.get(loaders._pool.__ray_call__.remote(lambda pool: pool._encoders))
    return {number: ray.get(each.__ray_call__.remote(lambda _: os.getpid())) for number, each in members.items()}


def kill(ray: Any, loaders: RayEncoders, place: int) -> None:
    os.kill([*processes(ray, loaders).values()][place], signal.SIGKILL)


def test_an_encoder_that_is_killed_changes_no_bit_and_an_error_in_one_is_one_line(ray: Any, tmp_path: Path) -> None:
    near, loaders = fit(None, 7), RayEncoders(1, run=tmp_path)
    pids: list[int] = []
    during = {2: partial(kill, ray, loaders, 0), 6: lambda: pids.extend(processes(ray, loaders).values())}
    far = fit(loaders, 7, Call(during))
    with suppress(psutil.NoSuchProcess):
        psutil.Process(*pids).wait(30)  # the encoders end with the fit
    assert far == near
    assert far["held out"].keys() == {"val/loss", "val/caption_gap"}, "validation is encoded there, too"
    waits = loaders.waits()
    assert waits is not None
    line = r"trainer waited \d+% for encoders, \d+% for the network; encoders busy \d+%(; raise data.num_encoders)?"
    assert re.fullmatch(line, waits)
    loaders, encoder = RayEncoders(1, run=tmp_path), Waiting(error="no such kernel")
    short = waiting_loader(loaders, encoder, 1)
    assert len([*short]) == 1
    assert loaders.waits() is None, "the first batch waits for the start"
    assert len([*short]) == 1
    assert loaders.waits() is not None, "epochs of one batch count"
    broken = iter(waiting_loader(loaders, encoder, 3))
    next(broken)
    message = r"data.encoders=ray: encoder 0 on [\d.]+ failed: RuntimeError: no such kernel; see Ray's log"
    with pytest.raises(UsageError, match=message) as raised:
        next(broken)
    assert "\n" not in str(raised.value)
    with pytest.raises(UsageError, match=r"asks for 99 CPU; the Ray cluster has 8 .*smaller data.num_encoders"):
        resize(tmp_path, 99)
    loaders.close()
    with pytest.raises(UsageError, match=r"resize got run=.*no run in that folder has encoders"):
        resize(tmp_path, 2)


@pytest.mark.slow
def test_losses_do_not_depend_on_deaths_of_encoders_nor_on_resuming(ray: Any, tmp_path: Path) -> None:
    loaders, pids = RayEncoders(2, run=tmp_path), list[int]()
    deaths: dict[int, Any] = {
        2: lambda: pids.extend(processes(ray, loaders).values()),
        3: lambda: os.kill(pids[0], signal.SIGKILL),
        4: lambda: os.kill(pids[1], signal.SIGKILL),
    }
    assert fit(loaders, 12, Call(deaths)) == fit()
    loaders = RayEncoders(1, run=tmp_path)

    def trained(name: str, steps: int, resume: Path | None, loaders: RayEncoders | None) -> Path:
        saving = small.Saving(tmp_path / name, resume=resume)
        small.fit(small.module(), digits(loaders), steps, saving)
        assert saving.last_saved is not None
        return saving.last_saved

    part = trained("part", 7, None, loaders)  # in the middle of an epoch
    whole = trained("whole", 12, None, None)
    small.assert_bitwise_equal(trained("part", 12, part, loaders), whole)


@pytest.mark.full("cluster")
def test_losses_do_not_depend_on_the_number_of_encoders_nor_on_their_type(ray: Any, tmp_path: Path) -> None:
    loaders, seen = RayEncoders(3, run=tmp_path), list[set[int]]()

    def look() -> None:
        seen.append(set(processes(ray, loaders)))

    changes = {1: look, 12: partial(resize, tmp_path, 1), 16: partial(resize, tmp_path, 2), 30: look}
    assert fit(loaders, 30, Call(changes)) == fit(None, 30)
    first, last = seen
    assert (len(first), len(last)) == (3, 2)
    assert len(first & last) == 1, "the two others were ended"
    loaders = RayEncoders(1, run=tmp_path)
    assert fit(loaders, 7, dtype="float32", texts=True) == fit(None, 7, dtype="float32", texts=True)


@pytest.mark.full("cluster")
def test_two_ranks_share_the_encoders(ray_address: str, tmp_path: Path) -> None:
    jobs: dict[str, dict[str, Any]] = {
        "near": {"address": None},
        "far": {"address": ray_address, "run": str(tmp_path / "run")},
    }
    ranks = run_jobs_of_all("encoder_jobs", jobs, tmp_path, world_size=2, timeout=300)
    for each in ranks:
        assert "trainer waited" in each["far"].pop("waits")
        each["near"].pop("waits")
        assert each["far"] == each["near"]


@pytest.mark.slow
def test_the_command_line_tells_where_encoders_are_and_which_side_waits(
    call_main: Callable[..., tuple[int, str]],
    ray_address: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    source = Digits("train")
    Path("photos").mkdir()
    for index in range(40):
        source.image(index).save(f"photos/{index}.png")
        Path(f"photos/{index}.txt").write_text(source.captions(index)[0])
    run = ["data=images", "data.train_data_dir=photos", "data.resolution=32", "data.num_val_samples=8", "logger=csv"]
    run += ["trainer.max_steps=6", "trainer.log_every_n_steps=1", "callbacks.samples=null"]
    far = ["data.encoders=ray", "data.num_encoders=2", "data.encoder_resources={encoder:1}"]
    code, _ = call_main(train, *run, "output_dir=near")
    assert code == 0
    with caplog.at_level("INFO"):
        code, out = call_main(train, *run, *far, "output_dir=far")
    assert code == 0, out
    assert re.search(rf"encoders on the Ray cluster at {ray_address}: ([\d.]+), \1", caplog.text)
    line = r"encoders +trainer waited \d+% for encoders, \d+% for the network; encoders busy \d+%"
    assert re.search(line, out)
    assert "encoders busy" in Path("far/report.html").read_text()

    def losses(folder: str) -> list[str]:
        (file,) = Path(folder).rglob("metrics.csv")
        return [row["train/loss"] for row in csv.DictReader(file.open()) if row["train/loss"]]

    assert losses("far") == losses("near")
    assert len(losses("far")) == 6
    code, out = call_main(train, *run, *far, "data.num_encoders=9", "output_dir=more", "data.train_data_dir=missing")
    assert (code, "asks for 9 CPU; the Ray cluster has 8" in out) == (2, True), "refused before data are read"


@pytest.mark.slow
@pytest.mark.parametrize("at_start", keep([False], [False, True], "cluster"))
def test_an_encoder_that_keeps_dying_is_named(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    class Versions:
        def items(self) -> None:
            os._exit(3)

    if at_start:
        monkeypatch.setattr(encoders, "package_versions", Versions)
    loaders = RayEncoders(1, run=tmp_path)
    message = (
        r"encoder 0 on (a machine|[\d.]+), 3 times without a batch between, failed: .*worker.* died.*; see Ray's log"
    )
    with pytest.raises(UsageError, match=message) as raised:
        list(waiting_loader(loaders, Waiting(error="die"), 3))
    assert "\n" not in str(raised.value)
    assert ("a machine" in str(raised.value)) is at_start
    loaders.close()


@pytest.mark.parametrize(("preempted", "deaths"), [(True, 0), (False, 1)])
def test_an_encoder_whose_machine_is_taken_away_has_not_died(ray: Any, preempted: bool, deaths: int) -> None:
    error = ray.exceptions.RayActorError(preempted=preempted)

    class Gone:
        class node:  # noqa: N801
            remote = staticmethod(lambda: failing(error))

    async def failing(error: Exception) -> None:
        raise error

    async def started() -> tuple[int, str | None, list[int]]:
        pool, added = EncoderPool({}, {}, (), []), list[int]()
        pool._add = added.append  # type: ignore[method-assign]
        pool._encoders[0] = Gone
        monkey = pytest.MonkeyPatch()
        with monkey.context() as patch:
            patch.setattr(ray, "kill", lambda actor: None)
            await pool._start(0)
        return pool._deaths[0], pool._trouble, added

    assert asyncio.run(started()) == (deaths, None, [0])


def test_the_whole_text_of_an_error_of_a_user_arrives() -> None:
    text = "data.encoders=ray: a.\nb: c."
    for error in (
        SimpleNamespace(cause=UsageError(text)),
        Exception(f"a trace\nsd_lightning._errors.UsageError: {text}"),
    ):
        assert str(usage_error(error, "encoder 0")) == "data.encoders=ray: a. b: c."  # type: ignore[arg-type]


def test_an_error_of_the_next_batch_comes_after_this_one(ray: Any) -> None:
    @ray.remote(num_cpus=0)  # type: ignore[untyped-decorator]
    def encode(keys: list[int]) -> tuple[list[Any], float, int]:
        if keys[0]:
            raise UsageError("the second")
        return [ray_module.put({"epoch": 0})], 0.0, 1

    def answered(keys: Any) -> Any:
        answer = encode.remote(keys)
        ray.wait([answer])
        return answer

    keys: Any = [[0], [1]]
    batches = iter(EncodedLoader(None, keys, answered, 1, ahead=2, pin=False, waits=Counter()))  # type: ignore[arg-type]
    assert next(batches) == {"epoch": 0}
    with pytest.raises(UsageError, match="the second"):
        next(batches)


@pytest.mark.parametrize(("waited", "busy", "is_raised"), [(12, 98, True), (9, 98, False), (33, 10, False)])
def test_more_encoders_are_advised_where_the_trainer_waits_for_busy_ones(
    tmp_path: Path, waited: int, busy: int, is_raised: bool
) -> None:
    loaders = RayEncoders(1, run=tmp_path)
    loaders._waits.update(encoders=waited, network=1, seconds=100, busy=busy, available=100)
    line = f"trainer waited {waited}% for encoders, 1% for the network; encoders busy {busy}%"
    assert loaders.waits() == line + "; raise data.num_encoders" * is_raised


@pytest.mark.slow
def test_a_machine_that_leaves_for_ever_does_not_stall_the_batches_sent_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Any
) -> None:
    try:
        nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
        cluster.wait_for_nodes()
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        loaders = RayEncoders(2, run=tmp_path)
        loader = waiting_loader(loaders, Waiting(0.1), 600)
        for number, batch in enumerate(loader):
            assert int(batch["epoch"][0]) == number
            if number == 5:
                cluster.remove_node(nodes[0], allow_graceful=False)
            if loader.num_encoders == 1:
                break
        assert loader.num_encoders == 1
        resize(tmp_path, 1)
        assert len([*islice(loader, 20)]) == 20, "the encoder without a machine was ended, not the other"
    finally:
        loaders.close()
        ray_module.shutdown()


@pytest.mark.full("cluster")
def test_an_encoder_whose_machine_the_cloud_takes_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cluster: Any
) -> None:
    from ray._raylet import GcsClient
    from ray.core.generated import autoscaler_pb2

    class Kept(Counter[int]):
        def __delitem__(self, number: object) -> None:
            """Keep it, though a batch has come."""

    try:
        lost = cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        loaders = RayEncoders(1, run=tmp_path)
        loader = waiting_loader(loaders, Waiting(0.1), 40)
        pool = loaders._pool
        ray_module.get(pool.__ray_call__.remote(lambda pool: setattr(pool, "_deaths", Kept())))
        reason = autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        for number, batch in enumerate(loader):
            assert int(batch["epoch"][0]) == number
            if number == 5:
                cluster.add_node(num_cpus=1)
                deadline = int((time.time() + 2) * 1000)
                GcsClient(address=cluster.address).drain_node(lost.node_id, reason, "taken away", deadline)
                cluster.remove_node(lost, allow_graceful=False)
        assert number == 39
        deaths = ray_module.get(pool.__ray_call__.remote(lambda pool: dict(pool._deaths)))
        assert deaths == {0: 0}, "it was replaced, and has not died"
    finally:
        loaders.close()
        ray_module.shutdown()


@pytest.mark.full("cluster")
def test_workers_on_ray_share_encoders_on_ray(ray_address: str, tmp_path: Path) -> None:
    two, far = ("strategy=ddp", "launcher.num_workers=2"), ("data.encoders=ray", "data.num_encoders=2")
    runs = [
        Training(ray_address, tmp_path / "far", *two, *far),
        Training(None, tmp_path / "near", "strategy=ddp", "trainer.devices=2"),
    ]
    try:
        for each in runs:
            assert each.wait() == 0, each.output()
    finally:
        for each in runs:
            each.end()
    assert weights(tmp_path / "far") == weights(tmp_path / "near")
    assert re.search(r"encoders +trainer waited \d+% for encoders", runs[0].output()), runs[0].output()


@pytest.mark.slow
@pytest.mark.alone
def test_throughput_is_that_of_the_slower_side(ray: Any, tmp_path: Path) -> None:
    encoder, loaders = Waiting(0.3), RayEncoders(1, run=tmp_path)
    for number, step in ((1, 0.25), (3, 0.08), (3, 0.2)):
        loader = waiting_loader(loaders, encoder, 300)
        resize(tmp_path, number)
        arrivals: list[tuple[float, Counter[str]]] = []
        for _ in loader:
            if loader.num_encoders == number:  # the others have started
                arrivals.append((time.perf_counter(), loaders._waits.copy()))
            if len(arrivals) == 36:
                break
            time.sleep(step)
        # A pause of the trainer makes a long round of three batches, and then short ones of those that were encoded
        # meanwhile: hence the median, after the nine that are in flight at first. If the sides took turns, it would be
        # half as long again. A busy machine makes the calls of encoders slower: that is in their share.
        rounds = sorted(zip(arrivals[9:], arrivals[12:]), key=lambda each: each[1][0] - each[0][0])
        (begun, before), (ended, after) = rounds[len(rounds) // 2]
        expected = max(step, 0.3 / number)
        assert (ended - begun) / 3 < 1.4 * expected
        loaders._waits = after - before
        shares = [int(share) / 100 for share in re.findall(r"(\d+)%", loaders.waits() or "")]
        assert shares[0] == pytest.approx(1 - step / expected, abs=0.15), "waited for encoders"
        assert shares[2] == pytest.approx(0.3 / number / expected, abs=0.2), "encoders busy"


@pytest.mark.parametrize(("dtype", "upcast"), [("float32", False), ("bfloat16", False), ("float16", True)])
def test_numbers_travel_in_the_type_of_the_encoder_and_lose_no_bit(dtype: Any, upcast: bool) -> None:
    model = LatentDiffusion.build("tiny")
    model.vae.register_to_config(force_upcast=upcast)
    encoder = LatentEncoder(model, dtype=dtype).to(torch.device("cpu"))
    ids = model.tokenize(["a red 3", "a 5"])
    sizes = torch.tensor([[32, 32]] * 2)
    batch = {
        "pixel_values": torch.rand(2, 3, 32, 32) * 2 - 1,
        "input_ids": ids,
        "wrong_input_ids": {name: each.flip(0) for name, each in ids.items()},
        "original_size": sizes,
        "crop_top_left": sizes * 0,
        "target_size": sizes,
        "epoch": torch.tensor([1, 1]),
        "index": torch.tensor([3, 4]),
        "captions": ["a", "b"],
        "bad": [(3, "torn")],
    }
    sent = packed(encoder.portable(), batch, seed=0)
    of_vae = "float32" if upcast else dtype
    assert str(sent["latent_moments"].dtype) == f"torch.{of_vae}"
    assert {str(each.dtype) for each in sent["text_embeddings"].values()} == {f"torch.{dtype}"}
    assert "pixel_values" not in sent
    assert "input_ids" not in sent
    arrived = cloudpickle.loads(cloudpickle.dumps(sent))
    assert (arrived["captions"], arrived["bad"]) == (["a", "b"], [(3, "torn")])
    near, far = encoder(batch, seed=5), encoder(arrived, seed=5)  # type: ignore[arg-type]
    assert near["latents"].stride() == far["latents"].stride(), "convolutions compute by the layout"
    assert torch.equal(near["latents"], far["latents"])
    for name in ("conditioning", "wrong_conditioning"):
        for key, value in near[name].items():  # type: ignore[literal-required]
            assert torch.equal(value, far[name][key])  # type: ignore[literal-required]


def test_a_store_has_no_such_setting(call_main: Callable[..., tuple[int, str]]) -> None:
    code, out = call_main(train, "data=latents", "data.store=store", "data.encoders=ray")
    assert (code, "data.encoders" in out, out.count("\n")) == (2, True, 1), out


def test_what_contradicts_encoders_elsewhere_is_refused() -> None:
    class Stored(Squares):
        latents: Any = object()

    def data(source: Any = None, **options: Any) -> SDDataModule:
        loader = LoaderOptions(loaders=RayEncoders(), **options.pop("loader", {}))
        return SDDataModule(source or Squares(), loader=loader, **options)

    for message, build in {
        r"images are encoded before training; write data.cache_latents=false": lambda: data(
            cache_latents=True, images=digits_data().images
        ),
        r"images are encoded before training; train on the images": lambda: data(Stored()),
        r"data.num_workers=4 has no effect with data.encoders=ray": lambda: data(loader={"num_workers": 4}),
        r"data.num_encoders=8 has no effect with data.encoders=trainer": lambda: digits_data(num_encoders=8),
        r"data.encoders=ray: images are encoded elsewhere only while": lambda: digits_data(encoders="ray"),
    }.items():
        with pytest.raises(UsageError, match=message):
            build()  # type: ignore[no-untyped-call]


def test_labels_that_no_machine_has_are_refused(ray: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"0 on 0 machine\(s\) with the label\(s\) {'gpu': 'A10G'}; write .* or other labels",
    ):
        RayEncoders(labels={"gpu": "A10G"}).connect()
    with pytest.raises(UsageError, match=r"with the label\(s\) {'gpu': '1'}"):
        RayEncoders(labels={"gpu": 1}).connect()  # type: ignore[dict-item]
    with pytest.raises(UsageError, match=r"data.num_encoders=0: expected 1 or more"):
        RayEncoders(0).connect()
    with pytest.raises(UsageError, match=r"asks for 1 GPU; the Ray cluster has 0"):
        RayEncoders(resources={"GPU": 1}).connect()


def test_encoders_without_a_place_end_the_run_after_a_while(
    ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoders, "_PLACE_SECONDS", 1.0)

    class Trainer:
        def here(self) -> bool:
            return True

    others = ray.remote(num_cpus=0, resources={"encoder": 8})(Trainer).remote()
    assert ray.get(others.here.remote())
    loaders = RayEncoders(resources={"CPU": 0, "encoder": 1}, run=tmp_path)
    with pytest.raises(
        UsageError, match=r"0 of 1 encoder\(s\) have got a place and their networks .* in 1 s.*smaller data"
    ):
        waiting_loader(loaders, Waiting(), 1)
    loaders.close()
    ray.kill(others)
