"""Ray: the same tasks, the same bytes; a killed worker costs its task only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import MissingExtra, WorkerDied
from penstock.preparation import prepare
from penstock.transforms import FunctionTransform, Tokenize

from .corpora import assert_holds, contents, make_corpus

pytestmark = pytest.mark.usefixtures("worker_processes")
SHARD = 60_000
BYTES = Tokenize("bytes")
TESTS = str(Path(__file__).parents[1])


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    make_corpus(tmp_path / "src", 1, 5)

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtra, match=r"pip install 'penstock-data\[ray\]'"):
        prepare(f"{tmp_path}/src/*.jsonl", tmp_path / "data", transform=BYTES, engine="ray")
    assert not (tmp_path / "data").exists()


@pytest.mark.stress
@pytest.mark.filterwarnings("ignore")  # Ray's own
class TestOnALocalCluster:
    @pytest.fixture(scope="class", autouse=True)
    def cluster(self) -> Iterator[None]:
        ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'penstock-data[ray]'")
        environment = {"env_vars": {"PYTHONPATH": TESTS}}
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
        yield
        ray.shutdown()

    def test_the_bytes_are_those_of_local_workers(self, tmp_path: Path) -> None:
        texts = make_corpus(tmp_path / "src")
        for name, more in {"plain": {}, "shuffled": {"shuffle": 5}}.items():
            common = {"transform": BYTES, "shard_bytes": SHARD, **more}
            prepare(f"{tmp_path}/src/*.jsonl", tmp_path / f"local-{name}", workers=1, **common)
            prepare(f"{tmp_path}/src/*.jsonl", tmp_path / f"ray-{name}", engine="ray", **common)
            assert contents(tmp_path / f"ray-{name}") == contents(tmp_path / f"local-{name}")
            assert_holds(tmp_path / f"ray-{name}", texts)

    def test_workers_have_the_environment_of_local_ones(self, tmp_path: Path) -> None:
        make_corpus(tmp_path / "src", 1, 5)
        transform = FunctionTransform("preparation.functions:environment", types={"environment": "bytes"})
        prepare(f"{tmp_path}/src/*.jsonl", tmp_path / "data", transform=transform, engine="ray")
        told = json.loads(bytes(penstock.open(tmp_path / "data")[0]["environment"]))
        threads = ("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS")
        expected = {**dict.fromkeys(threads, "1"), "MIMALLOC_PURGE_DELAY": "-1"}
        assert told.items() >= {name: os.environ.get(name, value) for name, value in expected.items()}.items()
        assert told["TOKENIZERS_PARALLELISM"] == "false"

    def test_a_killed_worker_costs_its_task_only(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        texts = make_corpus(tmp_path / "src")
        mark = tmp_path / "mark"
        transform = FunctionTransform("preparation.functions:suicidal_once", types={"length": "int64"})
        import ray

        @ray.remote
        def set_mark(path: str) -> None:  # the variable must be there before the first worker is asked
            import os

            os.environ["PENSTOCK_TEST_MARK"] = path

        monkeypatch.setenv("PENSTOCK_TEST_MARK", str(mark))
        ray.shutdown()
        environment = {"env_vars": {"PYTHONPATH": TESTS, "PENSTOCK_TEST_MARK": str(mark)}}
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env=environment)
        done = prepare(
            f"{tmp_path}/src/*.jsonl", tmp_path / "data", transform=transform, engine="ray", shard_bytes=4000
        )
        assert mark.exists()
        assert done.failures == {"ray worker": 1}
        assert len(penstock.open(tmp_path / "data")) == len(texts)
        assert penstock.open(tmp_path / "data")[: len(texts)]["length"].tolist() == [len(text) for text in texts]

    def test_a_task_that_kills_every_worker_stops_the_run(self, tmp_path: Path) -> None:
        make_corpus(tmp_path / "src", 1, 20)
        transform = FunctionTransform("preparation.functions:suicidal", types={"length": "int64"})
        with pytest.raises(WorkerDied, match=r"WorkerCrashedError while preparing .*, like the 2 before it"):
            prepare(f"{tmp_path}/src/*.jsonl", tmp_path / "data", transform=transform, engine="ray")
