"""TopK: the largest entries of gradients are sent, and a rank keeps the others for later."""
# No postponed annotations here: DistributedDataParallel compares those of the hook with types.

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from ..base.errors import WeftError, check
from ..call.attempt import preparing
from ..group.group import Group
from .backward import hook
from .sparsify import Sparsifier
from .state import NAME, State


class TopK(State):
    """The state of `topk_hook`, which sends the largest entries of gradients; one for each model.

    Each rank adds a parameter's gradient to the parameter's residual, which it keeps. It sends the
    fraction `density` of the entries of this sum, those of the largest magnitude, and keeps the
    others as the new residual (error feedback). `weft.sparse_all_reduce` averages what the ranks
    sent: an entry is the sum of what ranks sent of it, divided by the number of all ranks; an entry
    that no rank sent is zero. Every rank gets the same bits.

    Where a rank's gradient of a parameter is all zeros it sends nothing of it, and keeps the
    residual: DistributedDataParallel throws away the mean of a parameter that no rank used.

    The constructor raises nothing. What is wrong with the settings is raised on every rank at the
    first use, from `backward()` or `weft.sync_sparsified`.

    Source: Lin et al., "Deep gradient compression" (ICLR 2018, arXiv 1712.01887), section 3.1.

    Attributes:
        calls: records (`weft.sparse.Record`) of the last sparse calls, oldest first, at most 256:
            one for each bucket of dense gradients in a step, and those of tables with sparse
            gradients.
        sparsifier: the settings, and what this rank keeps.

    Example:
        >>> import torch, weft
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> with weft.init():
        ...     model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
        ...     state = weft.ddp.TopK(0.25, min_numel=1)
        ...     model.register_comm_hook(state, weft.ddp.topk_hook)
        ...     model(torch.tensor([1.0, 8.0, 2.0, 4.0])).backward()
        ...     model.module.weight.grad, state.state_dict(model)
        (tensor([[0., 8., 0., 0.]]), {'weight': tensor([1., 0., 2., 4.])})
    """

    def __init__(
        self,
        density: float = 0.01,
        *,
        error_feedback: bool = True,
        min_numel: int = 8192,
        wire_dtype: torch.dtype | None = None,
        group: Group | dist.ProcessGroup | None = None,
    ) -> None:
        """All but `group` must be the same on every rank; weft compares it.

        Args:
            density: the fraction of a parameter's entries that a rank sends, above 0. The number of
                entries is rounded up. Entries that are zero are not sent. With 1 the parameter is
                sent whole.
            error_feedback: whether a rank keeps what it does not send. Without it gradients are
                biased, and the loss becomes worse.
            min_numel: parameters of fewer entries, such as biases and norms, are sent whole.
            wire_dtype: None, or `torch.bfloat16`, `torch.float16` or `torch.float32`: entries of
                wider dtypes are sent in this dtype, also the two parts of complex ones. The
                residual keeps the rounding error of what this rank sends, but not that of the mean,
                which is rounded, too.
            group: the model's process group, or a Group; None: torch.distributed's default group.
        """
        super().__init__(group, wire_dtype=wire_dtype)
        self.sparsifier = Sparsifier(density, error_feedback, min_numel, wire_dtype)

    def state_dict(self, model: nn.Module | None = None) -> dict[str, Tensor]:
        """Return the residuals of this rank, for a checkpoint. Each rank has its own.

        Args:
            model: whose gradients the hook reduces, wrapped or not; None: there is none, for
                `weft.sync_sparsified` alone has this state.

        Returns:
            Residuals by the names of the model's parameters, without DistributedDataParallel's
            prefix, or by the names that `weft.sync_sparsified` was given: 1-D, as long as the
            flattened gradient, in float32 or, for float64, in float64. A parameter of which all was
            sent has none.

        Raises:
            WeftError: something is kept of parameters, and there is no model; on this rank alone.
        """
        return self.sparsifier.state_dict(model)

    def load_state_dict(self, state: dict[str, Tensor], model: nn.Module | None = None) -> None:
        """Continue from what `state_dict()` returned on this rank, of the same model; copy it.

        Call it before the first backward, with as many ranks as it was saved on. Other parameters
        may be frozen than were.

        Args:
            state: what `state_dict` returned.
            model: whose gradients the hook reduces, wrapped or not, as for `state_dict`.

        Raises:
            WeftError: `state` is not what `state_dict()` returns, or has a name that no parameter
                of the model has; raised on this rank alone. Later, on every rank, from
                `backward()`: it was loaded without the model, or a residual has not as many entries
                as its parameter.

        Example:
            >>> import torch, weft
            >>> with weft.init():
            ...     state = weft.ddp.TopK(0.5, min_numel=1)
            ...     weft.sync_sparsified({"w": torch.tensor([1.0, 8.0])}, state)
            ...     again = weft.ddp.TopK(0.5, min_numel=1)
            ...     again.load_state_dict(state.state_dict())
            >>> again.state_dict()
            {'w': tensor([1., 0.])}
        """
        self.sparsifier.load_state_dict(state, model)

    def asked(self) -> dict[str, str]:
        super().asked()
        return self.sparsifier.settings()

    def reduction(self, bucket: dist.GradBucket) -> Callable[[Group, Tensor], None]:
        parameters = bucket.parameters()
        # complex numbers come as two real ones
        sizes = [p.numel() * (2 if p.is_complex() else 1) for p in parameters]
        owners = {str(number): parameter for number, parameter in enumerate(parameters)}

        def reduction(group: Group, flat: Tensor) -> None:
            parts = dict(zip(owners, flat.split_with_sizes(sizes), strict=True))
            with preparing(group, NAME):
                if names := self.sparsifier.of_names:
                    raise WeftError(
                        f"something is kept of {min(names)!r}, which is no parameter: have a state "
                        "for each model, and pass the model to load_state_dict"
                    )
                check(self.sparsifier.wrong(parts, owners))
            # DistributedDataParallel learns which parameters no rank used, and throws the means of
            # these away, when all buckets have come; in the buckets they are zeros
            self.sparsifier.reduce(group, parts, owners, may_be_unused=True)
            self.note_call(group)

        return reduction


def topk_hook(state: TopK, bucket: dist.GradBucket) -> Future[Tensor]:
    """The communication hook that sends sparsified gradients; `TopK` has an example.

    Use it as `ddp_model.register_comm_hook(weft.ddp.TopK(density), weft.ddp.topk_hook)`, on every
    rank, before the first backward. Gradients that are sparse tensors are sent whole. A model with
    tables that a batch may leave unused needs `keep_tables_used(model)` too. The residuals of a
    reduction that raises stay as they were.

    Raises:
        WeftError: from `backward()`: settings are wrong or differ between ranks, or a residual that
            was loaded is of another model; the same text on every rank. The next step works, but
            for wrong settings.
        WireError: from `backward()`: a peer or a link failed; names the culprit. The group is lost.
    """
    return hook(state, bucket)
