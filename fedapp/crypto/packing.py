"""Gradients as integers, and many integers in one plaintext.

A plaintext is a row of signed fields of one width: a row's gradient and hessian of every output,
and in a reply many such pairs side by side::

    plaintext = sum over i of field[i] * 2^(width * i)

              slot 1                 slot 0          slot = all outputs of one row or sum
    ... | g1 | h1 | g0 | h0 || g1 | h1 | g0 | h0 |

Adding plaintexts adds field by field, and multiplying by a power of two moves whole slots.

Head-room: a row's field is at most 2^precision in absolute value, and a sum has at most n_rows
rows, each once. With width = precision + bits of n_rows + 1, a field of a sum has absolute value

    n_rows * 2^precision <= (2^bits - 1) * 2^precision < 2^(width - 1),

so fields are the plaintext's balanced digits in base 2^width and are read one by one, lowest first.
k of them make up a plaintext below 2^(width k - 1) in absolute value, since

    sum of (2^(width - 1) - 1) 2^(width i) < 2^(width k - 1).

A key n of b bits holds plaintexts up to (n - 1) / 2 >= 2^(b - 2) in absolute value, so k fields fit
where width * k <= b - 1. There is no offset, so no count of rows is needed to undo it, and none is
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedapp.arrays import Doubles, Floats, Ints
from fedapp.histograms.fixed_point import to_fixed

PAIR = 2  # gradient and hessian
# float64's digits: the error of a value is below 2^-53 of the largest, as in XGBoost's sums. Fewer
# would shorten slots, but change splits of late rounds.
PRECISION = 53


@dataclass(frozen=True, slots=True)
class FixedPoint:
    """Reals as multiples of ``2**(exponent - precision)``, one scale for each of a pair.

    A float32 above ``2**(exponent - precision + 23)`` in absolute value is represented exactly, a
    smaller one with an error of at most half a multiple. ``exponents`` are those of the bounds
    ``2**exponent`` of gradients and hessians; ``precision`` is in bits, at most 62.
    """

    exponents: tuple[int, int]
    precision: int = PRECISION

    @staticmethod
    def covering(gradients: Floats, precision: int = PRECISION) -> FixedPoint:
        """The finest scales for float32 gradients of shape (n_rows, n_outputs, 2)."""
        if n_wrong := int((~np.isfinite(gradients)).sum()):
            raise ValueError(f"gradients must be finite, got {n_wrong} that are not")
        largest = np.abs(gradients).max(axis=(0, 1), initial=0)
        first, second = (int(np.frexp(np.float64(value))[1]) for value in largest)
        return FixedPoint((first, second), precision)

    def encode(self, gradients: Floats) -> Ints:
        """Nearest multiples, int64, of float32 gradients of shape (n_rows, n_outputs, 2)."""
        return to_fixed(gradients, self.precision - np.array(self.exponents))

    def decode(self, sums: Sequence[Sequence[int]], n_outputs: int) -> Doubles:
        """Sums of ``2 * n_outputs`` multiples as reals, rounded once; float64, shape (n, n_outputs,
        2).
        """
        multiples = np.array([[float(field) for field in fields] for fields in sums])
        shifts = np.array(self.exponents) - self.precision
        reals: Doubles = np.ldexp(multiples.reshape(-1, n_outputs, PAIR), shifts)
        return reals


@dataclass(frozen=True, slots=True)
class Layout:
    """Layout of fields in plaintexts under a key of ``key_bits``; the same at every party.

    A sum has at most ``n_rows`` rows, or other terms, each of ``n_outputs`` outputs that share a
    plaintext: a slot. An output is a gradient and a hessian, which is never negative, or one signed
    number if not ``in_pairs``. A field has ``precision`` bits in a row, as of ``FixedPoint``.
    Raises a ValueError if a number is out of range, or one row does not fit in a plaintext.
    """

    key_bits: int
    n_rows: int
    n_outputs: int = 1
    precision: int = PRECISION
    in_pairs: bool = True

    def __post_init__(self) -> None:
        for name, least in (("n_rows", 1), ("n_outputs", 1), ("precision", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.n_slots < 1:
            outputs = f"{self.n_outputs} {'pairs' if self.in_pairs else 'outputs'}"
            rule = f"> {self.slot_bits} for {outputs} of {self.field_bits} bits"
            raise ValueError(f"key-bits must be {rule}, got {self.key_bits}")

    @property
    def n_fields(self) -> int:
        """Fields of a slot."""
        return PAIR * self.n_outputs if self.in_pairs else self.n_outputs

    @property
    def field_bits(self) -> int:
        """Width of a field: a sum of ``n_rows`` rows and a sign."""
        return self.precision + self.n_rows.bit_length() + 1

    @property
    def slot_bits(self) -> int:
        """Width of a slot: all fields of a row or sum."""
        return self.field_bits * self.n_fields

    @property
    def n_slots(self) -> int:
        """Slots of a plaintext."""
        return (self.key_bits - 1) // self.slot_bits

    def n_plaintexts(self, n_sums: int) -> int:
        """Plaintexts for ``n_sums`` sums, all full but the last."""
        return -(-n_sums // self.n_slots)

    def pack(self, fields: Ints) -> list[int]:
        """One plaintext a row, the row's fields in slot 0.

        Expects int64 of shape (n_rows, n_outputs, 2) if ``in_pairs``, from ``FixedPoint.encode``,
        or (n_rows, n_outputs); raises a ValueError for another shape, or a field above
        ``2**precision``.
        """
        shape = (self.n_outputs, PAIR)[: 1 + self.in_pairs]
        if fields.shape[1:] != shape:
            sizes = ", ".join(map(str, ("n", *shape)))
            raise ValueError(f"fields must be of shape ({sizes}), got {fields.shape}")
        n_large = int((np.abs(fields) > 1 << self.precision).sum())
        if n_large:
            raise ValueError(f"fields must be at most 2^{self.precision}, got {n_large} above")
        # Fields from the highest to the lowest; in a pair the hessian is the lower one.
        plaintexts, width = [0] * len(fields), self.field_bits
        for column in fields[:, ::-1].reshape(len(fields), self.n_fields).T:
            pairs = zip(plaintexts, column.tolist(), strict=True)
            plaintexts = [(high << width) + low for high, low in pairs]
        return plaintexts

    def unpack(self, plaintexts: Sequence[int], n_sums: int) -> list[list[int]]:
        """Fields of ``n_sums`` sums: lists of ``n_fields`` integers, of a pair the gradient first.

        Raises a ValueError for a sum that ``n_rows`` rows cannot have.
        """
        width = self.field_bits
        half, mask, limit = 1 << (width - 1), (1 << width) - 1, self.n_rows << self.precision
        # Lowest sums of the fields, lowest field first; those of hessians are never negative.
        lowest = ((0, -limit) if self.in_pairs else (-limit,)) * self.n_outputs
        slots: list[list[int]] = []
        for plaintext in plaintexts:
            remainder = plaintext
            for _ in range(min(self.n_slots, n_sums - len(slots))):
                slots.append([])
                for low in lowest:
                    field = ((remainder + half) & mask) - half
                    remainder = (remainder - field) >> width
                    if not low <= field <= limit:
                        rule = f"at most {self.n_rows} {'rows' if self.in_pairs else 'terms'}"
                        raise ValueError(f"sums must be of {rule}, got one beyond")
                    slots[-1].append(field)
            if remainder:
                raise ValueError("plaintexts must be 0 past their last slot, got one that is not")
        if not self.in_pairs:
            return slots
        return [[fields[index ^ 1] for index in range(self.n_fields)] for fields in slots]


def grouped_layouts(
    key_bits: int, n_rows: int, n_outputs: int, precision: int = PRECISION
) -> tuple[Layout, ...]:
    """Layouts of several ciphertexts a row, where one cannot hold the pairs of all outputs.

    As few layouts as possible, in the order of the outputs; their sizes differ by one at most.
    Raises a ValueError as ``Layout`` does.
    """
    single = Layout(key_bits, n_rows, 1, precision)
    n_groups = -(-n_outputs // single.n_slots)
    sizes = [len(group) for group in np.array_split(np.arange(n_outputs), n_groups)]
    return tuple(Layout(key_bits, n_rows, size, precision) for size in sizes)


def readable_rows(layouts: Sequence[Layout], max_depth: int, max_leaves: int = 0) -> int:
    """Rows whose bins a round of boosting can show to whoever encrypts the numbers and splits.

    What is encrypted need not be a gradient. The row i of a node as 2^i makes each sum a list of
    its rows, one a bit of the slot. Nodes of a level share no row, so each of the last level that
    is summed lists as many. A simple way, and no upper bound: where a bin has few rows, fewer bits
    identify them.

    Parameters
    ----------
    layouts : of a row's ciphertexts.
    max_depth, max_leaves : of a round's trees, 0 leaves for no limit; each output has one.
    """
    n_bits = sum(layout.slot_bits * layout.n_outputs for layout in layouts)
    n_nodes = 1 << max(max_depth - 1, 0)
    return n_bits * min(n_nodes, 2 * max_leaves or n_nodes)
