"""The files of a model's folder that define its processor: chat template and image settings."""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dhp_ray.data.errors import DataError
from dhp_ray.data.families import FAMILIES
from dhp_ray.data.families.base import MIN_PIXELS, Family
from dhp_ray.errors import first_line
from dhp_ray.json_object import json_object

read_json = partial(json_object, key="model.path", error=DataError)
TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))  # a fast tokenizer needs one of these sets


def family_in(folder: Path) -> type[Family]:
    """The family of the model in a folder. DataError: config.json is missing or of another family."""
    file = folder / "config.json"
    if not file.is_file():
        raise DataError(f"model.path: {folder} has no config.json; allowed: a local Hugging Face folder")
    name = read_json(file).get("model_type")
    if name not in FAMILIES:
        raise DataError(f"model.path: {file} is of a model of type {name!r}; allowed: {', '.join(FAMILIES)}")
    return FAMILIES[name]


def check_processor_files(folder: Path) -> None:
    """Refuse a folder without a processor's files, or with token ids beyond the embedding. Needs no transformers."""
    check_byte_order_marks(folder)
    if not any(all((folder / name).is_file() for name in names) for names in TOKENIZER_FILES):
        raise DataError(f"model.path: {folder} has no tokenizer; allowed: a folder with "
                        f"{' or with '.join(' and '.join(names) for names in TOKENIZER_FILES)}")
    chat_template(folder)
    if (folder / "tokenizer.json").is_file():
        check_vocabulary(folder, _stored_ids(read_json(folder / "tokenizer.json")))
    image_settings(folder, family_in(folder))


def chat_template(folder: Path) -> str:
    """The template of a model's conversations: the processor's own, else the tokenizer's. DataError: there is none."""
    template = None
    if (file := folder / "chat_template.jinja").is_file():
        try:
            template = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"model.path: {file} is not UTF-8 text: {first_line(error)}") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        if template is None and (folder / name).is_file():
            template = read_json(folder / name).get("chat_template")
    if not isinstance(template, str):
        raise DataError(f"model.path: {folder} has no chat template; allowed: chat_template.jinja, chat_template.json, "
                        "or one in tokenizer_config.json")
    return template.removeprefix("\ufeff")  # a byte order mark, which would begin every prompt


def check_byte_order_marks(folder: Path) -> None:
    """Refuse text files that transformers does not read for a byte order mark (`chat_template` removes its own)."""
    for file in sorted(filter(Path.is_file, [*folder.glob("*.json"), *folder.glob("merges.txt")])):
        with open(file, "rb") as stored:
            if stored.read(4).startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise DataError(f"model.path: {file} begins with a byte order mark; allowed: UTF-8 without one")


def check_vocabulary(folder: Path, token_ids: Iterable[Any]) -> None:
    """Refuse token ids beyond the embedding of the folder's model, as after words were added to the tokenizer alone."""
    tree = read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    text = tree.get("text_config")
    size = _number((text if isinstance(text, dict) else {}).get("vocab_size", tree.get("vocab_size")))
    needed = 1 + max((number for number in token_ids if isinstance(number, int)), default=-1)
    if 0 < size < needed:
        raise DataError(f"model.path: {folder}: its tokenizer has token ids up to {needed - 1}, which take {needed} "
                        f"rows of the model's embedding; it has {size} (vocab_size in config.json); allowed: a "
                        "tokenizer that the embedding holds, or a model saved after resize_token_embeddings")


def _stored_ids(tree: dict[str, Any]) -> Iterator[Any]:
    """The token ids in a tokenizer.json, whatever kind of model it holds."""
    model, added = tree.get("model"), tree.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from vocabulary.values()
    elif isinstance(vocabulary, list):
        yield from range(len(vocabulary))
    yield from (token.get("id") for token in (added if isinstance(added, list) else ()) if isinstance(token, dict))


def own_pixels(folder: Path, most_pixels: int) -> int:
    """The `data.max_pixels` that scales images as a folder does if `most_pixels` does not; else 0."""
    settings = _settings(folder, "image")[1] or {}
    size: dict[str, Any] = settings["size"] if isinstance(settings.get("size"), dict) else {}
    tiles, height, width = (_number(tree.get(name)) for tree, name in (
        (settings, "max_patches"), (size, "height"), (size, "width")))
    if tiles and height and width:  # so many tiles at most, and the whole image as one
        area = height * width
        return 0 if min(tiles, max(1, most_pixels // area - 1)) == tiles else (tiles + 1) * area
    own = _number(settings.get("max_pixels")) or _number(size.get("longest_edge"))
    own //= family_in(folder).frames_of_image
    return 0 if own == most_pixels else own


def image_settings(folder: Path, family: type[Family]) -> dict[str, Any]:
    """The settings of a folder's image processor, with the model's own of patches. DataError: none, or of others."""
    if not family.image_processors:
        return {}
    stored = _settings(folder, "image")[1]
    if stored is None:
        raise DataError(f"model.path: {folder} has no preprocessor_config.json")
    kind = str(stored.get("image_processor_type", ""))
    if not kind.startswith(family.image_processors):
        raise DataError(f"model.path: {folder} has the image processor {kind or '(none)'}; allowed: "
                        f"{family.image_processors[0]}")
    try:
        of_model = {name: family.plain(name, value)
                    for name, value in family.model_settings(read_json(folder / "config.json")).items()}
        settings = {name: family.plain(name, stored.get(name, default))
                    for name, default in {**family.image_settings, **of_model}.items()}
    except DataError:
        raise
    except (TypeError, ValueError, KeyError, ZeroDivisionError) as error:
        raise DataError(f"model.path: {folder}: sizes of images and patches in config.json or preprocessor_config.json "
                        f"cannot be used: {first_line(error)}") from None
    for name, value in of_model.items():
        if settings[name] != value:
            raise DataError(f"model.path: {folder}: {name} is {settings[name]} in preprocessor_config.json, {value} in "
                            "config.json; allowed: the same")
    return settings


def least_pixels(folder: Path) -> tuple[int, int]:
    """The fewest pixels of an image, and of a video, by the folder's own processors. DataError: one is no number."""
    image = _pixels(folder, "image", "min_pixels", "shortest_edge") or MIN_PIXELS
    return image, _pixels(folder, "video", "min_pixels", "shortest_edge") or image


def video_pixels(folder: Path) -> int:
    """The most pixels of all of a video's frames; 0: the folder does not say. DataError: it is no number."""
    return _pixels(folder, "video", "max_pixels", "longest_edge")


def _pixels(folder: Path, kind: str, name: str, edge: str) -> int:
    """A bound of a processor under its older name, else its newer one; 0: there is none."""
    file, settings = _settings(folder, kind)
    size = (settings or {}).get("size")
    given = {name: (settings or {}).get(name), f"size.{edge}": size.get(edge) if isinstance(size, dict) else None}
    for key, value in given.items():
        if value and _number(value) < 1:
            raise DataError(f"model.path: {file}: {key} is {value!r}; allowed: a number of pixels")
    return next((_number(value) for value in given.values() if value), 0)


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)) else 0


def _settings(folder: Path, kind: str) -> tuple[Path, dict[str, Any] | None]:
    """The file that holds the settings of a folder's processor of images or videos, and these, None without any."""
    own = folder / f"{'video_' * (kind == 'video')}preprocessor_config.json"
    if own.is_file():
        return own, read_json(own)
    file = folder / "processor_config.json"  # of transformers from 5.0 on
    settings = read_json(file).get(f"{kind}_processor") if file.is_file() else None
    return file, settings if isinstance(settings, dict) else None


def write_json(path: Path, tree: dict[str, Any]) -> None:
    path.write_text(json.dumps(tree, indent=2) + "\n", encoding="utf-8")
