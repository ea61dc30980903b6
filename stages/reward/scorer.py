"""The reward model as it is trained: padding on the right needs no mask, and answers may be packed."""

from torch import Tensor

from rlhf.stages.models import ScalarModel, scalars
from rlhf.stages.packing import Pack, states


class Scorer(ScalarModel):
    """Reads answers that begin at the left end: no token of a causal model sees the padding behind them."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        with_hidden: bool = False,
        packed: Pack | None = None,
        slots: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Numbers per token [A,T] as its parent's, those at padding without meaning.

        With a pack, which holds the same answers, that is read; `slots` [A,T] say where in it a token lies.
        """
        trunk = self.classifier.base_model
        if packed is None or slots is None:
            hidden = trunk(input_ids=input_ids, use_cache=False).last_hidden_state
            values = scalars(self.classifier.score, hidden)
        else:
            hidden = states(trunk, self.classifier.config, packed)[0]  # [N,d]
            values = scalars(self.classifier.score, hidden)[slots]
            hidden = hidden[slots] if with_hidden else hidden
        values = (values - self.mean) / self.std
        return (values, hidden) if with_hidden else values
