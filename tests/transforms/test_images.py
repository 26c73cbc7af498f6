"""Encoded images to pixels, JPEGs, or checked bytes; and every image that must not get through."""

from __future__ import annotations

import io
import json
import pickle
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import penstock
from penstock.errors import MissingExtra, SchemaError
from penstock.transforms import DecodeImage, Output

from .tokenizer_examples import make_records, reasons

GRADIENT = np.linspace(0, 255, 60 * 80 * 3).astype(np.uint8).reshape(60, 80, 3)


def encode(array: Any = GRADIENT, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    image.save(file, format, **options)
    return file.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that says it is huge, in 100 bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def run(images: list[Any], **options: Any) -> Output:
    return DecodeImage(**options).open()(make_records({"image": images}))


def test_resize_gives_what_pillow_gives() -> None:
    output = run([encode(), encode(GRADIENT[::-1])], size=(30, 20))
    expected = np.asarray(Image.fromarray(GRADIENT).resize((20, 30), Image.Resampling.BILINEAR))
    assert output.columns["image"].shape == (2, 30, 20, 3)
    assert np.array_equal(output.columns["image"][0], expected)
    assert not np.array_equal(output.columns["image"][1], expected)


def test_crop_takes_the_middle_with_its_shape_unbent() -> None:
    wide = np.zeros((40, 120, 3), np.uint8)
    wide[:, 40:80] = 200
    cropped = run([encode(wide)], size=20, mode="crop").columns["image"][0]
    assert cropped.shape == (20, 20, 3)
    assert (cropped[:, 1:-1] == 200).all(), "all but the edge, where a pixel outside is averaged in"
    assert not (run([encode(wide)], size=20).columns["image"][0] == 200).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 40), st.integers(1, 40))
def test_crop_works_for_any_shapes(height: int, width: int, to_height: int, to_width: int) -> None:
    image = encode(np.full((height, width, 3), 9, np.uint8))
    output = run([image], size=(to_height, to_width), mode="crop")
    assert output.errors == ()
    assert (output.columns["image"] == 9).all()


def test_keep_stores_pixels_of_any_size_with_their_shape() -> None:
    small = GRADIENT[:10, :7]
    output = run([encode(), encode(small)], mode="keep")
    assert DecodeImage(mode="keep", keep=()).columns() == {"image": "uint8[*]", "image_shape": "int32[3]"}
    assert output.columns["image_shape"].tolist() == [[60, 80, 3], [10, 7, 3]]
    assert np.array_equal(output.columns["image"][1].reshape(10, 7, 3), small)


def test_jpeg_is_re_encoded_at_the_wanted_size_and_quality() -> None:
    low, high = (run([encode()], size=32, store="jpeg", quality=quality).columns["image"][0] for quality in (10, 95))
    assert Image.open(io.BytesIO(high)).size == (32, 32)
    assert Image.open(io.BytesIO(high)).format == "JPEG"
    assert len(low) < len(high)


def test_as_is_keeps_the_bytes_and_still_refuses_what_cannot_be_decoded() -> None:
    whole = encode(format="JPEG")
    output = run([whole, whole[: len(whole) // 2], encode()], mode="keep", store="as_is")
    assert output.columns["image"] == [whole, encode()]
    assert reasons(output) == [(1, "corrupt_image")]
    assert output.sources.tolist() == [0, 2]


def test_draft_decoding_differs_from_full_decoding_by_little() -> None:
    yy, xx = np.mgrid[0:1200, 0:1600]
    photo = np.stack([xx * 255 // 1600, yy * 255 // 1200, (xx + yy) % 256 // 2], -1).astype(np.uint8)
    encoded = encode(photo, "JPEG", quality=90)
    fast, full = (run([encoded], size=100, draft=draft).columns["image"][0].astype(int) for draft in (True, False))
    assert np.abs(fast - full).mean() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
def test_exif_orientation_is_applied_by_default_and_ignored_on_request(orientation: int, format: str) -> None:
    from PIL import ImageOps

    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = encode(GRADIENT, format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(encoded))).convert("RGB")
    output = run([encoded], mode="keep")
    assert output.columns["image_shape"][0].tolist() == [upright.height, upright.width, 3]
    assert np.array_equal(output.columns["image"][0], np.asarray(upright).reshape(-1))
    ignored = run([encoded], mode="keep", orientation="ignore")
    assert ignored.columns["image_shape"][0].tolist() == [60, 80, 3]
    scaled = run([encoded], size=(30, 50)).columns["image"][0].astype(int)
    reference = np.asarray(upright.resize((50, 30), Image.Resampling.BILINEAR)).astype(int)
    assert np.abs(scaled - reference).max() <= 2


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_every_eight_bit_mode_becomes_rgb(mode: str) -> None:
    image = Image.fromarray(GRADIENT).convert(mode)
    encoded = encode(image, "TIFF" if mode == "CMYK" else "PNG")
    expected = np.asarray(Image.open(io.BytesIO(encoded)).convert("RGB").resize((8, 8), Image.Resampling.BILINEAR))
    assert np.array_equal(run([encoded], size=8).columns["image"][0], expected)


def test_one_channel_gives_grey() -> None:
    assert run([encode()], size=8, channels=1).columns["image"].shape == (1, 8, 8, 1)
    assert DecodeImage(size=8, channels=1, keep=()).columns() == {"image": "uint8[8,8,1]"}
    assert run([encode()], mode="keep", channels=1).columns["image_shape"].tolist() == [[60, 80, 1]]


def test_sixteen_bit_pixels_are_refused_rather_than_clipped() -> None:
    deep = encode(Image.fromarray(np.full((4, 4), 40_000, np.uint16)))
    output = run([deep], size=4)
    assert reasons(output) == [(0, "unsupported_image")]
    assert "not of 8 bits" in output.errors[0].message


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_the_first_frame_of_an_animation_is_taken_and_that_is_counted(format: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    encoded = encode(frames[0], format, save_all=True, append_images=frames[1:])
    output = run([encoded, encode(frames[0], format)], mode="keep")
    red, green, blue = output.columns["image"][0][:3].tolist()
    assert red > 250
    assert green + blue < 5, "WebP is not exact"
    assert output.noticed == {"animations_of_which_only_the_first_frame_was_taken": 1}
    assert run([encoded], mode="keep", store="as_is").noticed == {}


def test_corrupt_images_are_bad_rows_and_the_rest_goes_on() -> None:
    jpeg = encode(format="JPEG")
    bad = [b"", b"not an image", jpeg[:40], jpeg[: len(jpeg) - 200], encode()[:60], b"\xff\xd8\xff" + b"\x00" * 100]
    output = run([jpeg, *bad, jpeg], size=16)
    assert reasons(output) == [(place, "corrupt_image") for place in range(1, len(bad) + 1)]
    assert output.columns["image"].shape == (2, 16, 16, 3)
    assert "0x" not in " ".join(error.message for error in output.errors), "messages are the same in every run"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_damage_to_a_file_escapes_as_an_exception(data: st.DataObject) -> None:
    encoded = bytearray(encode(format=data.draw(st.sampled_from(["JPEG", "PNG", "WEBP", "GIF", "TIFF", "BMP"]))))
    for _ in range(data.draw(st.integers(1, 8))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    output = run([bytes(encoded)], size=8)
    assert output.num_samples + len(output.errors) == 1


def test_image_bombs_are_refused_before_they_are_decoded() -> None:
    bombs = [png_header(9_000, 9_999), png_header(12_000, 12_000), png_header(60_000, 60_000)]
    output = run([*bombs, encode()], size=8)
    assert reasons(output) == [(place, "too_many_pixels") for place in range(3)]
    assert output.num_samples == 1


def tiled_tiff(tile: int) -> bytes:
    """A TIFF of 16 x 16 grey pixels in one tile of that width and height."""
    data = zlib.compress(bytes(tile * tile))
    values = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: tile, 323: tile, 324: 8, 325: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in values.items())
    header = b"II*\0" + struct.pack("<I", 8 + len(data))
    return header + data + struct.pack("<H", len(values)) + entries + bytes(4)


def test_a_small_image_in_a_huge_tile_is_refused_before_it_is_decoded() -> None:
    for options in ({"size": 8}, {"mode": "keep", "store": "as_is"}):
        output = run([tiled_tiff(16), tiled_tiff(1024), tiled_tiff(1040)], max_pixels=1 << 20, **options)
        assert reasons(output) == [(2, "too_many_pixels")]
        assert "tiles of 1040 x 1040 are 1,081,600 pixels" in output.errors[0].message


def test_the_pixel_limit_is_exact() -> None:
    output = run([encode(), encode(GRADIENT[:59])], size=8, max_pixels=59 * 80)
    assert reasons(output) == [(0, "too_many_pixels")]
    assert "80 x 60 is 4,800 pixels; max_pixels allows 4,720" in output.errors[0].message


def test_formats_that_would_start_other_programs_are_not_decoded() -> None:
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n"
    assert reasons(run([postscript], size=8)) == [(0, "corrupt_image")]


def test_nulls_and_wrong_types_are_bad_rows() -> None:
    output = run([None, 7, encode()], size=8)
    assert reasons(output) == [(0, "null"), (1, "wrong_type")]
    arrow = DecodeImage(size=8).open()(make_records({"image": pa.array([None, encode()], pa.binary())}))
    assert reasons(arrow) == [(0, "null")]


def test_hugging_face_image_columns_are_understood() -> None:
    column = pa.array([{"bytes": encode(), "path": "a.png"}, None, {"bytes": None, "path": "b.png"}])
    output = DecodeImage(size=8).open()(make_records({"image": column}))
    assert output.num_samples == 1
    assert reasons(output) == [(1, "null"), (2, "null")]
    assert "no bytes but the path 'b.png'" in output.errors[1].message


def test_a_missing_column_is_an_error() -> None:
    with pytest.raises(SchemaError, match="No column 'jpg' in the source; its columns are 'image'"):
        run([encode()], size=8, column="jpg")


def test_labels_are_kept_by_default_where_there_are_any() -> None:
    records = make_records({"image": [encode(), b"", encode()], "label": pa.array([4, 5, 6]), "path": ["a", "b", "c"]})
    ready = DecodeImage(size=8).before_run([records])
    assert ready.columns() == {"image": "uint8[8,8,3]", "label": "int64"}
    assert ready.open()(records).columns["label"].tolist() == [4, 6]
    assert DecodeImage(size=8).before_run([make_records({"image": [b""]})]).columns() == {"image": "uint8[8,8,3]"}


def test_the_output_goes_straight_into_a_dataset(tmp_path: Path) -> None:
    records = make_records({"image": [encode(), b"", encode()], "path": ["a", "b", "c"]})
    for number, options in enumerate(
        [{"size": 8}, {"mode": "keep"}, {"size": 8, "store": "jpeg"}, {"mode": "keep", "store": "as_is"}]
    ):
        transform = DecodeImage(keep={"path": "bytes"}, **options)  # type: ignore[arg-type]
        output = transform.open()(records)
        with penstock.DatasetWriter(tmp_path / str(number), transform.columns() or {}) as writer:
            writer.write_batch(output.columns)
        dataset = penstock.open(tmp_path / str(number))
        assert [dataset[i]["path"] for i in range(len(dataset))] == [b"a", b"c"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "stretch", "size": 8}, "mode='stretch'; the choices are"),
        ({}, "'resize' and 'crop' need a size"),
        ({"size": 8, "mode": "keep"}, "'keep' none"),
        ({"size": 0}, "integers of at least 1"),
        ({"size": 8, "store": "as_is"}, "leaves the bytes alone"),
        ({"size": 8, "quality": 100}, "quality=100; it must be a number from 1 to 95"),
        ({"size": 8, "max_pixels": 10**9}, "max_pixels=1000000000"),
        ({"size": 8, "channels": 4}, "channels=4"),
        ({"mode": "keep", "keep": ["image_shape"]}, "'image_shape' is a column that the transform writes"),
    ],
)
def test_choices_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DecodeImage(**options)


def test_every_option_is_part_of_the_identity() -> None:
    base = DecodeImage(size=8)
    others = [
        DecodeImage(size=9), DecodeImage(size=8, mode="crop"), DecodeImage(size=8, store="jpeg"),
        DecodeImage(size=8, max_pixels=10**6), DecodeImage(size=8, quality=80), DecodeImage(size=8, channels=1),
        DecodeImage(size=8, filter="box"), DecodeImage(size=8, orientation="ignore"), DecodeImage(size=8, draft=False),
        DecodeImage(size=8, column="jpg"), DecodeImage(size=8, keep=["label"]),
    ]  # fmt: skip
    assert len({json.dumps(each.identity) for each in [base, *others]}) == 1 + len(others)
    assert pickle.loads(pickle.dumps(base)) == base


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(MissingExtra, match=r"penstock-data\[images\]"):
        DecodeImage(size=8).open()


def many_scans(num_scans: int, width: int = 2000, height: int = 2000) -> bytes:
    """A progressive JPEG whose last scan, a few hundred bytes over all pixels, comes again and again."""
    encoded = encode(Image.new("L", (width, height), 90), "JPEG", progressive=True)
    begin, end = encoded.rindex(b"\xff\xda"), encoded.rindex(b"\xff\xd9")
    return encoded[:end] + encoded[begin:end] * (num_scans - encoded.count(b"\xff\xda")) + encoded[end:]


@pytest.mark.parametrize("options", [{"size": 8}, {"mode": "keep", "store": "as_is"}])
def test_a_jpeg_of_thousands_of_scans_is_a_bad_row(options: dict[str, Any]) -> None:
    bomb = many_scans(2000)
    assert len(bomb) < 400_000
    output = run([encode(), bomb, encode()], **options)
    assert reasons(output) == [(1, "too_many_scans")]
    assert "more than 357 scans of 4,000,000 pixels" in output.errors[0].message


def test_a_progressive_jpeg_with_many_scans_in_its_thumbnail_is_decoded() -> None:
    exif = Image.Exif()
    exif[0x010E] = "\xff\xda".encode("latin-1") * 2000
    encoded = encode(GRADIENT, "JPEG", progressive=True, exif=exif)
    assert encoded.count(b"\xff\xda") > 2000
    assert run([encoded, many_scans(50, 64, 64)], size=8).errors == ()
