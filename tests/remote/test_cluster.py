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


@pytest.mark.parametrize("num_workers", [0, [2, 1], [1, 2, 3]])
def test_impossible_numbers_of_workers(num_workers: Any) -> None:
    with pytest.raises(UsageError, match=r"launcher.num_workers=.*expected"):
        Ray(num_workers=num_workers)
