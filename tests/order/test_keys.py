import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.order import ORDER_VERSION, derive_key

labels = st.lists(st.one_of(st.integers(), st.text(max_size=8)), max_size=4)


def test_golden_keys_belong_to_version_1():
    assert ORDER_VERSION == 1
    assert derive_key(0) == 12187880699856004552
    assert derive_key(7, "rows", 0) == 3290560149576689142
    assert derive_key(-1) == 10808537141197535953
    assert derive_key(2**70, "é") == 7395929826930226613


@given(st.integers(), labels, st.integers(), labels)
def test_different_arguments_give_different_keys(seed, some, other_seed, others):
    is_same = (seed, *some) == (other_seed, *others)
    assert (derive_key(seed, *some) == derive_key(other_seed, *others)) == is_same


def test_parts_do_not_run_into_each_other():
    keys = [derive_key(1, "ab"), derive_key(1, "a", "b"), derive_key(1, "", "ab"), derive_key(1, "1")]
    keys += [derive_key(1, 1), derive_key(1), derive_key(1, ""), derive_key(1, 0), derive_key(256), derive_key(-1)]
    assert len(keys) == len(set(keys))


@given(st.integers(-(2**63), 2**63 - 1))
def test_a_numpy_integer_is_an_integer(seed):
    assert derive_key(np.int64(seed)) == derive_key(seed)


@given(st.integers(), labels)
def test_a_key_has_64_bits(seed, some):
    assert 0 <= derive_key(seed, *some) < 2**64


def test_a_seed_that_is_not_an_integer_is_refused():
    with pytest.raises(TypeError, match="float"):
        derive_key(1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("hash_seed", ["1", pytest.param("0", marks=pytest.mark.stress)])
def test_a_fresh_interpreter_with_another_hash_seed_gives_the_same_order(hash_seed):
    program = (
        "from penstock.order import *;"
        "print(derive_key(7, 'rows', 0), FullOrder(10**9, 7, 0).rows(range(3)).tolist(),"
        "WindowedOrder([3, 0, 2, 4, 1, 5], 7, 0, 2).rows(range(15)).tolist(),"
        "Mixture([5, 3, 2], 7).sources(range(9)).tolist())"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert answer.stdout.strip() == (
        "3290560149576689142 [895861355, 819652814, 178245310] "
        "[12, 14, 11, 4, 10, 3, 13, 8, 7, 9, 6, 5, 2, 0, 1] "
        "[2, 1, 1, 2, 0, 2, 0, 0, 0]"
    )


def test_the_room_opens_without_torch():
    program = "import sys, penstock.order; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
