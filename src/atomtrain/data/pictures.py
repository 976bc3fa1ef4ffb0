"""Pictures that rows name: files beside the data, opened with bounds, the same whenever read.

Nothing is fetched. A file is read once to be described and again when its row is trained on; then
it must still be the same. Of formats only those are opened that Pillow reads by itself.
"""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Iterable
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, NamedTuple

from atomtrain.errors import DataError
from atomtrain.units import counted

if TYPE_CHECKING:
    from PIL.Image import Image

_FORMATS = ("BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
_MOST_BYTES = 256 << 20
_MOST_ROW_PIXELS = 1 << 29
"""Of all pictures of a row, which are open together."""
_MOST_LETTERS = 200
"""Of a name in messages."""


class Picture(NamedTuple):
    """A file, and what was in it."""

    path: Path
    sha256: str


def find_picture(name: str, folder: Path | None) -> Path:
    """Return the file that a row means.

    Args:
        name: As the row says.
        folder: Of the data file; `None`: the data have none.

    Raises:
        DataError: it is an address, leads out of the folder, or is not a file.
    """
    if "://" in name or name.startswith(("data:", "//")):
        raise DataError(
            f"the image {name[:60]!r} is an address, and nothing is fetched; save it beside the "
            "data, and name the file"
        )
    if folder is None:
        raise DataError(
            f"the image {name[:60]!r} cannot be found, since the data are not a file; write rows "
            "and images to a folder, and name its file with --data"
        )
    if "\0" in name or PurePath(name).is_absolute() or ".." in PurePath(name).parts:
        raise DataError(
            f"the image {name[:60]!r} is not named from the folder of the data ({folder}); put it "
            "there or below, and name it from there"
        )
    path = folder / name
    try:
        found = path.is_file()
    except OSError:  # no file can be called so: it is too long, such as an image in base64
        found = False
    if not found:
        shown = folder / name[:_MOST_LETTERS]
        raise DataError(f"there is no image {shown}; restore it, or take the row out")
    return path


def describe(path: Path) -> tuple[Picture, Image]:
    """Return what stands for a file, and its picture in RGB.

    Raises:
        DataError: it cannot be read, is not a picture, or has too many pixels.
    """
    content = _read(path)
    return Picture(path, hashlib.sha256(content).hexdigest()), _opened(content, path)


def describe_all(paths: Iterable[Path]) -> list[tuple[Picture, Image]]:
    """Return what stands for each file of a row, and its picture.

    Raises:
        DataError: as `describe`; or together they have too many pixels.
    """
    found, pixels = [], 0
    for path in paths:
        found.append(describe(path))
        width, height = found[-1][1].size
        pixels += width * height
        if pixels > _MOST_ROW_PIXELS:
            raise DataError(
                f"its first {counted(len(found), 'image')} have {pixels} pixels together, at most "
                f"{_MOST_ROW_PIXELS} are taken; make them smaller, or give fewer"
            )
    return found


def open_again(picture: Picture) -> Image:
    """Return a picture that was described before.

    Raises:
        DataError: the file is gone, or another one.
    """
    found, image = describe(picture.path)
    if found != picture:
        raise DataError(
            f"the image {picture.path} has changed since the run began; restore it, or start "
            "another run"
        )
    return image


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise DataError(f"the image {path} cannot be read ({error.strerror})") from error
    if len(content) > _MOST_BYTES:
        raise DataError(f"the image {path} is larger than {_MOST_BYTES >> 20} MiB; make it smaller")
    return content


def _opened(content: bytes, path: Path) -> Image:
    """Return the picture as transformers opens it: turned as it was taken, in RGB."""
    from PIL import Image, ImageOps

    stream = io.BytesIO(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(stream, formats=_FORMATS) as found:
                return ImageOps.exif_transpose(found).convert("RGB")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(
            f"the image {path} has more than {Image.MAX_IMAGE_PIXELS} pixels; make it smaller"
        ) from error
    except Exception as error:  # whatever a format's reader raises
        reason = " ".join(str(error).replace(repr(stream), "").split())[:120]
        raise DataError(
            f"the image {path} cannot be opened ({reason}); give it as one of {', '.join(_FORMATS)}"
        ) from error
