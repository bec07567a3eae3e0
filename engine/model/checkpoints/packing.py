"""Parts that the formats of packed weights share: codes in words of 32 bits, and grids by scale and zero point."""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.model.checkpoints.formats import BadModule
from engine.weights.grouped import GroupedWeight

_WORD_BITS = 32
_GROUP_MULTIPLE = 32


def codes_per_word(bits: int) -> int:
    """Return the number of codes in a word."""
    return _WORD_BITS // bits


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """Return the codes in int32 words [...], as uint8 [..., codes_per_word]; the first is in the lowest bits."""
    if words.dtype is not torch.int32:
        raise BadModule(f"codes are packed in {words.dtype}, not in int32")
    values = words.contiguous().unsqueeze(-1).view(torch.uint8)  # 4 bytes a word, little-endian as in the file
    if bits == 4:
        values = torch.stack([values & 15, values >> 4], dim=-1).flatten(-2)
    return values


def pack_words(codes: Tensor, bits: int) -> Tensor:
    """Return codes [rows, n], uint8, as int32 words [rows, ceil(n / codes_per_word)]; see `unpack_words`."""
    padded = F.pad(codes, (0, -codes.shape[1] % codes_per_word(bits)))
    packed = padded[:, ::2] | padded[:, 1::2] << 4 if bits == 4 else padded
    return packed.flatten().view(torch.int32).reshape(len(codes), -1)


def expect_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise BadModule when a tensor has another shape."""
    if tuple(tensor.shape) != shape:
        raise BadModule(f"{name} has shape {list(tensor.shape)}, not {list(shape)}")


def grid(bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, *, group_size: int) -> GroupedWeight | Tensor:
    """Return the weight `scale * (code - zero)` from codes [out_features, in_features], uint8.

    `scales` and `zeros`, integers, are [out_features, num_groups]; without zeros the grid is symmetric, about
    2**(bits - 1). Groups that the layout of grouped weights cannot express give a plain float32 tensor.
    """
    in_features = codes.shape[1]
    group_size = min(group_size, in_features)
    weight = GroupedWeight(
        bits=bits,
        group_size=group_size,
        codes=codes.contiguous(),
        scales=scales.float().contiguous(),
        offsets=_offsets(bits, scales, zeros),
    )
    is_expressible = group_size == in_features or group_size % _GROUP_MULTIPLE == 0
    return weight if is_expressible else weight.dequantize(torch.float32)


def _offsets(bits: int, scales: Tensor, zeros: Tensor | None) -> Tensor | None:
    if zeros is None or bool((zeros == 1 << (bits - 1)).all()):
        return None
    # Exact: a float16 or bfloat16 scale has at most 11 bits, a zero point 9.
    return (scales.float() * -zeros.float()).contiguous()


def scatter_groups(codes: Tensor, scales: Tensor, zeros: Tensor, group_of_input: Tensor) -> Tensor:
    """Return the float32 weight of codes [out_features, in_features] whose inputs lie in groups in any order.

    `group_of_input` [in_features] has indices of the columns of `scales` and `zeros`.
    """
    groups = group_of_input.long()
    if groups.numel() and not 0 <= int(groups.min()) <= int(groups.max()) < scales.shape[1]:
        raise BadModule(f"g_idx names groups beyond the {scales.shape[1]} that there are")
    return scales.float()[:, groups] * (codes.float() - zeros.float()[:, groups])


def is_in_order(group_of_input: Tensor, group_size: int) -> bool:
    """Return whether consecutive inputs share a group, as without act-order."""
    return torch.equal(group_of_input.long(), torch.arange(len(group_of_input)) // group_size)
