"""AdamW for bfloat16 weights with float32 moments and no master weights.

The gradient is widened, the moments and the step are computed in float32 in the order of torch's own single-tensor
kernel, and the new weight is rounded to its dtype. The state dict has AdamW's form. For float32 weights it is AdamW.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class WideAdamW(torch.optim.AdamW):
    """AdamW whose moments are float32 whatever the weights are.

    Its `load_state_dict` would narrow the moments to the weights' dtype, as that of every torch optimizer does.
    """

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # closures are for optimizers that evaluate more than once
        """Update every parameter that has a gradient."""
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group)

    def _update(self, weight: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(weight, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(weight, dtype=torch.float32)
        beta1, beta2 = group["betas"]
        assert weight.grad is not None
        gradient, wide = weight.grad.float(), weight.float()
        state["step"] += 1
        step = state["step"].item()
        wide.mul_(1 - group["lr"] * group["weight_decay"])
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step_size = group["lr"] / (1 - beta1**step)
        scale = (state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        wide.addcdiv_(state["exp_avg"], scale, value=-step_size)
        weight.copy_(wide)
