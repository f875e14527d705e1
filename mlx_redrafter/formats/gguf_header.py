"""See that a GGUF file is whole before anything that trusts it reads it."""

import mmap
import struct
from math import prod
from pathlib import Path

from mlx_redrafter.errors import FormatError

# struct codes of metadata values, by GGUF's number; 8 is a string, 9 an array.
_SCALARS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9

# Tensor types by GGUF's number: name, values in a block, bytes of a block.
_TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    8: ("Q8_0", 32, 34),
}


def check(path: Path) -> None:
    """Walk the header, and see that every tensor is of a known type and lies inside the file."""
    try:
        with path.open("rb") as stream:
            if stream.read(4) != b"GGUF":
                raise FormatError(f"{path.name} is not a GGUF file")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _Walk(path, data).run()
    except (struct.error, ValueError, OverflowError) as error:
        raise FormatError(f"{path.name} is cut short or damaged: fetch it again") from error


class _Walk:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 4

    def run(self) -> None:
        version = self.number("I")
        if version not in (2, 3):
            raise FormatError(f"{self.path.name} is GGUF version {version}: only 2 and 3 are read")
        num_tensors, num_values = self.number("Q"), self.number("Q")
        alignment = 32
        for _ in range(num_values):
            key, value = self.text(), self.value(self.number("I"))
            if key == b"general.alignment":
                alignment = value
        if alignment < 1:
            raise ValueError("alignment")
        ends = [self.tensor(alignment) for _ in range(num_tensors)]
        start = -(-self.at // alignment) * alignment
        if start + max(ends, default=0) > len(self.data):
            raise ValueError("a tensor past the end")

    def number(self, code: str) -> int:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return int(value)

    def text(self) -> bytes:
        length = self.number("Q")
        self.skip(length)
        return self.data[self.at - length : self.at]

    def skip(self, length: int) -> None:
        if length > len(self.data) - self.at:
            raise ValueError("a value past the end")
        self.at += length

    def value(self, kind: int) -> int:
        """Step over a metadata value; whole numbers are returned."""
        if kind == _ARRAY:
            kind, length = self.number("I"), self.number("Q")
            if kind in _SCALARS:
                self.skip(length * struct.calcsize("<" + _SCALARS[kind]))
            elif kind == _STRING:
                for _ in range(length):
                    self.text()
            else:
                raise ValueError("an array of an unknown type")
        elif kind == _STRING:
            self.text()
        elif kind not in _SCALARS:
            raise ValueError("a value of an unknown type")
        elif (code := _SCALARS[kind]) in "fd":
            self.skip(struct.calcsize("<" + code))
        else:
            return self.number(code)
        return 0

    def tensor(self, alignment: int) -> int:
        """Step over a tensor's entry; gives where its data end, from the start of all data."""
        name = self.text().decode()
        shape = [self.number("Q") for _ in range(self.number("I"))]
        kind, offset = self.number("I"), self.number("Q")
        if kind not in _TENSOR_TYPES:
            known = ", ".join(known for known, _, _ in _TENSOR_TYPES.values())
            raise FormatError(
                f"{self.path.name}: tensor {name} is of a type that is not read (only {known} are)"
            )
        _, values, size = _TENSOR_TYPES[kind]
        if not 1 <= len(shape) <= 4 or shape[0] % values or offset % alignment:
            raise ValueError("a tensor's shape or offset")
        return offset + prod(shape) // values * size
