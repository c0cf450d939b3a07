"""The connection to a Ray cluster."""

from typing import Any

import pytest

from sd_lightning._errors import UsageError
from sd_lightning.remote.cluster import check_resources, connect
from sd_lightning.remote.launchers import Ray


def test_no_cluster_at_the_address_is_one_line_and_no_wait() -> None:
    with pytest.raises(UsageError, match=r"launcher=ray: no Ray cluster answers at 127.0.0.1:1 .*ray start --head"):
        connect("launcher=ray", "127.0.0.1:1")


def test_more_than_the_cluster_has_is_refused(ray: Any) -> None:
    check_resources("launcher=ray", {"CPU": 8}, setting="launcher.num_workers")
    with pytest.raises(UsageError, match=r"asks for 9 CPU; the Ray cluster has 8 on 1 machine.*launcher.num_workers"):
        check_resources("launcher=ray", {"CPU": 9}, setting="launcher.num_workers")
    with pytest.raises(UsageError, match="asks for 1 GPU; the Ray cluster has 0"):
        check_resources("data.encoders=ray", {"GPU": 1}, setting="data.num_encoders")


@pytest.mark.parametrize(
    ("labels", "there"),
    [
        ({"role": "trainer"}, 8),
        ({"role": "!trainer"}, 6),
        ({"role": "in(encoder, trainer)"}, 12),
        ({"role": "!in(encoder,trainer)"}, 2),
        ({"role": "encoder", "zone": "a"}, 0),
    ],
)
def test_only_machines_with_the_labels_count(
    ray: Any, monkeypatch: pytest.MonkeyPatch, labels: dict[str, str], there: int
) -> None:
    nodes = [node({"CPU": 8}, role="trainer"), node({"CPU": 4}, role="encoder"), node({"CPU": 2})]
    monkeypatch.setattr(ray, "nodes", lambda: [*nodes, node({"CPU": 99}, role="trainer") | {"Alive": False}])
    if there:
        check_resources("launcher=ray", {"CPU": there}, setting="launcher.num_workers", labels=labels)
    with pytest.raises(UsageError, match=rf"asks for {there + 1} CPU; the Ray cluster has {there} on .*label.*'role'"):
        check_resources("launcher=ray", {"CPU": there + 1}, setting="launcher.num_workers", labels=labels)


def test_a_cluster_that_grows_is_not_refused(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [node({"CPU": 1}) | {"Labels": {"ray.io/node-group": "head"}}])
    check_resources("launcher=ray", {"CPU": 8}, setting="launcher.num_workers", labels={"role": "trainer"})


def node(resources: dict[str, float], **labels: str) -> dict[str, Any]:
    """Return a machine as Ray describes it."""
    return {"Alive": True, "Resources": resources, "Labels": labels}


@pytest.mark.parametrize("num_workers", [0, [2, 1], [1, 2, 3]])
def test_impossible_numbers_of_workers(num_workers: Any) -> None:
    with pytest.raises(UsageError, match=r"launcher.num_workers=.*expected"):
        Ray(num_workers=num_workers)
