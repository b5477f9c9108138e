"""A mixture of experts beside the MLP: both read the residual stream, each with its own norms."""

from __future__ import annotations

from torch import Tensor

from engine.model.families import ExpertNames
from engine.model.layer import MLP
from engine.model.loader import Loader
from engine.model.mixtures.experts import Experts
from engine.model.norms import Norm, RMSNorm
from engine.model.spec import DecoderSpec


class ExpertsBesideMLP(Experts):
    """`norm(mlp(norm(x))) + norm(experts(norm(x)))`, for the residual stream x, [T, hidden]."""

    def __init__(
        self, loader: Loader, spec: DecoderSpec, index: int, name: str, mlp: MLP, before: Norm
    ) -> None:
        """name: of the layer. before: the norm of the MLP's input."""
        names = spec.family.experts
        assert isinstance(names, ExpertNames)
        super().__init__(loader, spec, index, name, names)
        self._mlp, self._before_mlp = mlp, before

        def norm(of: str) -> Norm:
            shape = (spec.hidden_size,)
            return loader.norm(f"{name}.{of}", shape, spec.family.norm, spec.norm_eps)

        self._after_mlp = norm("post_feedforward_layernorm_1")
        self._before = norm("pre_feedforward_layernorm_2")
        self._after = norm("post_feedforward_layernorm_2")
        scale = loader.tensor(f"{name}.router.scale", spec.hidden_size)
        self._before_router = RMSNorm(
            scale * spec.hidden_size**-0.5, spec.norm_eps, spec.family.norm, loader.elementwise
        )
        self._expert_scales = loader.tensor(
            f"{name}.router.per_expert_scale", self.route.num_experts
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        scores, chosen = self.route(self._before_router(hidden))
        scores = scores * self._expert_scales[chosen]
        routed = self.compute(self._before(hidden), scores, chosen)
        return self._after_mlp(self._mlp(self._before_mlp(hidden))) + self._after(routed)
