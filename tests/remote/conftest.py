"""The Ray cluster of the test run, and one with nodes that come and go."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from ray_head import address_of


@pytest.fixture(scope="session")
def ray_address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """`host:port` of a Ray cluster on this machine that all tests of the run share, with 8 logical CPUs."""
    folder, is_worker = tmp_path_factory.getbasetemp(), "PYTEST_XDIST_WORKER" in os.environ
    return address_of(folder.parent if is_worker else folder, os.getppid() if is_worker else os.getpid())


@pytest.fixture
def ray(ray_address: str) -> Iterator[object]:
    """The module `ray`, connected to that cluster while the test runs."""
    from sd_lightning.remote.cluster import connect

    module = connect("the test", ray_address)
    yield module
    module.shutdown()


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A Ray cluster of a head without CPUs, to which a test adds nodes."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    yield cluster
    cluster.shutdown()
