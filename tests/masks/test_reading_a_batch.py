"""What a batch must hold, and what is said when it does not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch

from penstock import masks

from .packs import pack

ALL = [masks.dense, masks.block_mask, masks.varlen, masks.hugging_face_kwargs]
FROM_DOCUMENT_IDS = [masks.dense, masks.block_mask]
FROM_BOUNDARIES = [masks.varlen, masks.hugging_face_kwargs]
Function = Callable[[object], object]


def batch_with(**entries: object) -> dict[str, object]:
    return {**pack([[3, 2], [4]], 6), **entries}


def as_numpy(batch: dict[str, object]) -> dict[str, object]:
    return {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("function", FROM_DOCUMENT_IDS)
def test_a_missing_key_is_named_along_with_those_present(function: Function) -> None:
    with pytest.raises(ValueError, match=r"no 'document_ids', only: tokens\. .*\.pack\(length\)"):
        function({"tokens": torch.zeros(2, 6)})


@pytest.mark.parametrize("function", FROM_BOUNDARIES)
@pytest.mark.parametrize("key", ["cu_seqlens", "max_seqlen"])
def test_a_missing_boundary_is_named(function: Function, key: str) -> None:
    batch = batch_with()
    del batch[key]
    with pytest.raises(ValueError, match=f"no '{key}'"):
        function(batch)


@pytest.mark.parametrize("function", FROM_DOCUMENT_IDS)
def test_document_ids_of_another_dtype_are_refused(function: Function) -> None:
    batch = batch_with(document_ids=torch.zeros(2, 6, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"'document_ids'\] is int64; expected an int32 .* \[B, T\]"):
        function(batch)


@pytest.mark.parametrize("function", FROM_DOCUMENT_IDS)
def test_document_ids_of_another_shape_are_refused(function: Function) -> None:
    batch = batch_with(document_ids=torch.zeros(12, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"'document_ids'\] has shape \[12\]; expected .* \[B, T\]"):
        function(batch)


@pytest.mark.parametrize("function", FROM_BOUNDARIES)
def test_cu_seqlens_per_row_are_refused(function: Function) -> None:
    batch = batch_with(cu_seqlens=torch.zeros(2, 3, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"'cu_seqlens'\] has shape \[2, 3\]; expected .* \[S \+ 1\]"):
        function(batch)


@pytest.mark.parametrize("function", FROM_BOUNDARIES)
@pytest.mark.parametrize("value", [torch.tensor(4), True, 4.0])
def test_max_seqlen_must_be_a_python_int(function: Function, value: object) -> None:
    with pytest.raises(TypeError, match=r"'max_seqlen'\] is \w+; expected a Python int"):
        function(batch_with(max_seqlen=value))


def test_a_list_is_not_an_array() -> None:
    with pytest.raises(TypeError, match=r"'document_ids'\] is list; expected an int32 tensor or array"):
        masks.dense(batch_with(document_ids=[[0, 0, 1]]))


@pytest.mark.parametrize("function", ALL)
def test_something_that_is_no_mapping_is_refused(function: Function) -> None:
    with pytest.raises(TypeError, match=r"a packed batch is a mapping .* not Tensor"):
        function(torch.zeros(2, 6))


def test_labels_of_another_dtype_are_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"'labels'\] is int32; expected an int64"):
        masks.hugging_face_kwargs(batch_with(labels=torch.zeros(2, 6, dtype=torch.int32)))


@pytest.mark.parametrize("block_size", [0, -128])
def test_a_block_size_below_one_is_refused(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size is {block_size}; expected at least 1"):
        masks.block_mask(batch_with(), block_size=block_size)


@pytest.mark.parametrize("block_size", [64.0, "64", None])
def test_a_block_size_that_is_no_integer_is_refused(block_size: object) -> None:
    with pytest.raises(TypeError, match=f"block_size is {block_size!r}; expected an int"):
        masks.block_mask(batch_with(), block_size=block_size)  # type: ignore[arg-type]


def test_an_unknown_kernel_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="kernel='xformers'; the choices are 'flash_attn' and 'torch'"):
        masks.varlen(batch_with(), kernel="xformers")  # type: ignore[call-overload]


def test_numpy_batches_give_the_masks_of_tensor_batches() -> None:
    batch, arrays = batch_with(), as_numpy(batch_with())
    assert torch.equal(masks.dense(arrays), masks.dense(batch))
    assert torch.equal(masks.block_mask(arrays).kv_indices, masks.block_mask(batch).kv_indices)
    assert torch.equal(masks.varlen(arrays)["cu_seqlens_q"], masks.varlen(batch)["cu_seqlens_q"])
    assert torch.equal(masks.hugging_face_kwargs(arrays)["input_ids"], masks.hugging_face_kwargs(batch)["input_ids"])


def test_a_read_only_array_is_copied_rather_than_made_writable() -> None:
    ids = np.array([[0, 0, 1]], dtype=np.int32)
    ids.flags.writeable = False
    assert masks.dense({"document_ids": ids}).sum() == 4


def test_masks_are_made_on_the_device_of_the_batch() -> None:
    # The meta device has no values: reading one on the way (.item(), nonzero) would fail here.
    ids = torch.zeros(2, 300, dtype=torch.int32, device="meta")
    assert masks.dense({"document_ids": ids}).device.type == "meta"
    assert masks.from_token(ids, 0).device.type == "meta"
    assert masks.block_mask({"document_ids": ids}).full_q_indices.device.type == "meta"


def test_importing_penstock_does_not_import_torch() -> None:
    result = run_python("import penstock, sys; assert 'torch' not in sys.modules")
    assert result.returncode == 0, result.stderr


def test_without_torch_the_room_names_the_extra() -> None:
    result = run_python("import sys; sys.modules['torch'] = None; import penstock.masks")
    assert "MissingExtra: penstock.masks needs PyTorch: pip install 'penstock-data[torch]'" in result.stderr
