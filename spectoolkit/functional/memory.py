"""What a server keeps for draft tokens that wait for their verification, in bytes."""

from __future__ import annotations


def draft_law_bytes(num_requests: int, num_draft_tokens: int, bytes_per_token: int) -> int:
    """Bytes of the draft laws of all pending drafts: N · K · b.

    `bytes_per_token` is b: V · 2 for a whole row in bf16, m · (4 + 2) for m ids of 32 bits and m probabilities in bf16
    (`datatypes.Dense`, `datatypes.TopM`), 0 where nothing is kept.

    Raises:
        ValueError: a negative argument.
    """
    return _product(num_requests=num_requests, num_draft_tokens=num_draft_tokens, bytes_per_token=bytes_per_token)


def key_value_bytes(
    num_requests: int,
    num_draft_tokens: int,
    *,
    num_layers: int,
    num_key_value_heads: int,
    head_dim: int,
    dtype_bytes: int = 2,
) -> int:
    """Bytes of the target's keys and values of the same draft tokens: N · K · 2 · L · H · d · dtype_bytes.

    L layers with H key/value heads of dimension d, each holding one key and one value per token.

    Raises:
        ValueError: a negative argument.
    """
    return 2 * _product(
        num_requests=num_requests,
        num_draft_tokens=num_draft_tokens,
        num_layers=num_layers,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        dtype_bytes=dtype_bytes,
    )


def _product(**factors: int) -> int:
    product = 1
    for name, factor in factors.items():
        if factor < 0:
            raise ValueError(f"{name}: expected an integer >= 0, got {factor!r}")
        product *= factor
    return product
