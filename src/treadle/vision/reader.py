"""From a client's URL to a picture as the model takes it. Threads of prompts only: it decodes, resizes, and may wait.

Prepared pictures are remembered by the bytes they came in, for a conversation sends its pictures again with each turn.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from treadle.errors import BadRequest
from treadle.types import Ids, Picture, Span
from treadle.vision.decode import decode
from treadle.vision.families import Family, Frame, processor_of
from treadle.vision.limits import Limits
from treadle.vision.source import image_bytes
from treadle.vision.spans import find_spans

LOW_PIXELS = 512 * 512
KEPT_BYTES = 128 * 2**20  # of prepared pixels


@dataclass(frozen=True, slots=True, eq=False)
class Shown:
    """A picture and the text that stands for it in a prompt, in the place of the template's marker."""

    picture: Picture
    text: str

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.picture.inputs.values()) + len(self.text)


class Reader:
    """One model's. `settings` are its image processor's, `config` the model's, `token` the image token."""

    def __init__(
        self,
        family: Family,
        settings: Mapping[str, Any],
        config: Mapping[str, Any],
        token: str,
        image_id: int,
        limits: Limits,
    ) -> None:
        self.family = family
        self.token = token
        self.image_id = image_id
        self.marker = family.marker or token
        self.limits = limits
        self._config = config
        self._call = family.call(config)
        self._processor = processor_of(family, settings)
        told = [family.processor, self._call, self._processor.to_dict(), limits.max_pixels]
        self._settings = json.dumps(told, sort_keys=True, default=str).encode()
        self._kept: OrderedDict[bytes, Shown] = OrderedDict()
        self._nbytes = 0
        self._lock = Lock()

    def read(self, url: str, param: str, low: bool = False) -> Shown:
        """The picture behind a `data:` URI or an http(s) URL, in few pixels if `low`. Raises BadRequest."""
        data = image_bytes(url, allow_web=self.limits.allow_web, param=param)
        key = hashlib.sha256(data).digest() + bytes([low])
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        most = min(LOW_PIXELS, self.limits.max_pixels) if low else self.limits.max_pixels
        made = self.show(decode(data, most, param=param), param)
        with self._lock:
            if key not in self._kept:
                self._kept[key] = made
                self._nbytes += made.nbytes
            while self._nbytes > KEPT_BYTES:
                self._nbytes -= self._kept.popitem(last=False)[1].nbytes
        return made

    def spans(self, ids: Ids, shown: Sequence[Shown]) -> tuple[Span, ...]:
        """Where the pictures lie in a prompt. Raises BadRequest where its text has image tokens of its own."""
        try:
            return find_spans(ids, self.image_id, [one.picture for one in shown], self.family.whole)
        except ValueError as fault:
            raise BadRequest(
                f"The prompt's text must not contain {self.token!r}: {fault}.", param="messages"
            ) from fault

    def show(self, image: Any, param: str = "image") -> Shown:
        """An RGB `PIL.Image` as the model takes it. Raises BadRequest where its shape is none that the model takes."""
        digest = hashlib.sha256(self._settings)
        digest.update(str(image.size).encode())
        digest.update(image.tobytes())
        try:
            outputs = self._processor([image], return_tensors="np", **self._call)
        except ValueError as fault:
            raise BadRequest(f"The model cannot take this image: {fault}.", param=param) from fault
        layout = self.family.layout(Frame(outputs, self._config, self.token))
        inputs = {name: np.ascontiguousarray(array) for name, array in layout.inputs.items()}
        return Shown(Picture(digest.digest(), inputs, layout.num_rows, layout.grid), layout.text)
