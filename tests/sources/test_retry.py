from __future__ import annotations

import pytest

from penstock.errors import FormatError, StorageError
from penstock.sources import SourceOptions
from penstock.sources._remote import retry

QUICK = SourceOptions(max_attempts=3)


class Refusal(Exception):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


class Flaky:
    """Fails as often as it has errors, then answers."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.num_calls = 0

    def __call__(self) -> str:
        self.num_calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return "answer"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    pauses: list[float] = []
    monkeypatch.setattr("penstock.sources._remote.time.sleep", pauses.append)
    return pauses


@pytest.mark.parametrize("error", [Refusal(503), Refusal(429), TimeoutError(), ConnectionResetError(), OSError("?")])
def test_what_may_pass_is_tried_again(error: Exception) -> None:
    call = Flaky(error, error)
    assert retry("s3://x", QUICK, call) == "answer"
    assert call.num_calls == 3


@pytest.mark.parametrize("error", [Refusal(403), Refusal(404), Refusal(400)])
def test_a_refusal_is_final_and_named(error: Exception) -> None:
    call = Flaky(error)
    with pytest.raises(StorageError, match="s3://x: reading failed after 1 attempt; the last error was: Refusal"):
        retry("s3://x", QUICK, call)
    assert call.num_calls == 1


@pytest.mark.parametrize("error", [FileNotFoundError("x"), PermissionError("x"), FormatError("x")])
def test_what_is_certain_is_passed_on_at_once(error: Exception) -> None:
    call = Flaky(error)
    with pytest.raises(type(error)):
        retry("s3://x", QUICK, call)
    assert call.num_calls == 1


def test_not_found_because_of_a_broken_connection_is_tried_again() -> None:
    error = FileNotFoundError("x")
    error.__cause__ = ConnectionResetError()
    call = Flaky(error)
    assert retry("http://x", QUICK, call) == "answer"


def test_pauses_grow_and_the_last_failure_is_told(no_pauses: list[float]) -> None:
    call = Flaky(*(OSError(f"failure {n}") for n in range(10)))
    with pytest.raises(StorageError, match=r"after 6 attempts; the last error was: OSError: failure 5\."):
        retry("s3://x", SourceOptions(max_attempts=6), call)
    assert len(no_pauses) == 5
    assert all(0.1 * 2**n <= pause <= 0.2 * 2**n for n, pause in enumerate(no_pauses))
