"""Pairs of consecutive states, as a codec of differences meets them: a small transformer, fine-tuned with AdamW.

The model first learns a fixed Markov source at an ordinary rate, so that its weights and moments are those of
a trained model; then it is fine-tuned by a policy gradient (sampled tokens, rewarded for a property of the sequence)
at `rate`. A *series* holds the state after 0, 1, 4 and 16 further optimizer steps.

Seeded. 20 s of one core in float32; bfloat16 takes four times as long on processors without it. `python -m
benchmarks._pairs` prints the table of docs/design/0006-differences.md.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from casckpt.codec import Encoded, encode
from casckpt.codec.difference import encode_difference
from casckpt.limits import CHUNK_SIZE

STEPS = (0, 1, 4, 16)
VOCABULARY, WIDTH, LENGTH, BATCH = 256, 192, 32, 32

Array = np.ndarray[Any, np.dtype[Any]]


class Transformer(nn.Module):
    """Two causal layers over learned embeddings; about 1.1 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.tokens(tokens) + self.places.weight[:length]
        mask = torch.full((length, length), float("-inf"), dtype=hidden.dtype).triu(1)
        return self.head(self.layers(hidden, mask=mask))  # type: ignore[no-any-return]


def series(dtype: torch.dtype, rate: float, *, seed: int = 0, warm_up_count: int = 60) -> list[dict[str, Array]]:
    """`{"weights", "exp_avg", "exp_avg_sq"}` as unsigned integers, all parameters in one run, for each of STEPS."""
    torch.manual_seed(seed)
    model = Transformer()
    _pretrain(model, warm_up_count)
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    states = []
    for step in range(warm_up_count // 3 + STEPS[-1] + 1):
        _policy_step(model, optimizer)
        if step - warm_up_count // 3 in STEPS:
            states.append(_flat(model, optimizer))
    return states


def _pretrain(model: Transformer, step_count: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    chances = torch.rand(VOCABULARY, VOCABULARY) ** 8
    for _ in range(step_count):
        columns = [torch.randint(VOCABULARY, (BATCH,))]
        for _ in range(LENGTH):
            columns.append(torch.multinomial(chances[columns[-1]], 1)[:, 0])
        tokens = torch.stack(columns, 1)
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def _policy_step(model: Transformer, optimizer: torch.optim.Optimizer) -> None:
    """REINFORCE on tokens drawn from the model's own distribution, advantage centred over the batch."""
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH))
    logits = model(tokens).float()
    drawn = torch.distributions.Categorical(logits=logits).sample()  # type: ignore[no-untyped-call]
    reward = (drawn % 7 == 0).float().mean(1)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    chosen = functional.log_softmax(logits, -1).gather(-1, drawn[..., None])[..., 0]
    loss = -(advantage[:, None] * chosen).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def _flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Array]:
    parameters = list(model.parameters())
    leaves = {"weights": [parameter.detach() for parameter in parameters]}
    for name in ("exp_avg", "exp_avg_sq"):
        leaves[name] = [optimizer.state[parameter][name] for parameter in parameters]
    return {name: _bits(torch.cat([tensor.reshape(-1) for tensor in tensors])) for name, tensors in leaves.items()}


def _bits(values: Tensor) -> Array:
    unsigned = {2: torch.int16, 4: torch.int32}[values.element_size()]
    bits: Array = values.view(unsigned).numpy().view(f"u{values.element_size()}")
    return bits


def shares(before: Array, after: Array) -> tuple[float, float]:
    """Bytes without and with a base, as shares of the plain bytes, over all chunks of a leaf, each by its own trial."""
    alone = based = 0
    for start in range(0, before.nbytes, CHUNK_SIZE):
        base, plain = (side.view(np.uint8).data[start : start + CHUNK_SIZE] for side in (before, after))
        alone += _size(encode(plain, after.itemsize))
        form = encode_difference(plain, base, after.itemsize, ceiling=2 * CHUNK_SIZE)
        assert form is not None and form.rejected is None
        based += _size(form)
    return alone / after.nbytes, based / after.nbytes


def _size(encoded: Encoded) -> int:
    return encoded.stored_size + len(encoded.params)


def main() -> None:
    """One line per kind of state, leaf and distance."""
    for dtype, rate in ((torch.float32, 1e-6), (torch.float32, 3e-4), (torch.bfloat16, 1e-6), (torch.bfloat16, 1e-5)):
        first, *others = series(dtype, rate)
        for leaf, before in first.items():
            for count, state in zip(STEPS[1:], others, strict=True):
                alone, based = shares(before, state[leaf])
                changed = float((before != state[leaf]).mean())
                print(f"{dtype} {rate:g} {leaf:10} {count:2} changed {changed:.4f} {alone:.4f} {based:.4f}", flush=True)


if __name__ == "__main__":
    main()
