"""Samplers in requests: a kind and its parameters, validated before a sampler is made.

Used by the sampling routes. `expstore.buffers.local_member` keeps the samplers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field

from expstore.api.errors import Refusal
from expstore.api.request_models import RequestModel
from expstore.api.where_conditions import check_condition, limit_condition
from expstore.buffers.local_member import make_described
from expstore.buffers.member import Limits, Status
from expstore.core.values import Mass
from expstore.samplers.base import Sampler
from expstore.samplers.groups import GroupSampler

Rows = Annotated[int, Field(ge=1, le=1_000_000)]


class _Described(RequestModel):
    """A sampler described in a request."""

    kind: str = Field(description="Kind of the sampler.")
    split: str | None = Field("train", max_length=100, description="Split whose rows are drawn; null: all.")

    def describe(self, where: str | None) -> dict[str, Any]:
        """Return the description, for draws from rows that match a condition."""
        return self.model_dump()


class _Sliced(_Described):
    """Samplers of slices: consecutive steps of one episode."""

    slice_len: Rows | None = Field(None, description="Steps of a slice; or give `num_slices`.")
    num_slices: Rows | None = Field(None, description="Slices of a batch; or give `slice_len`.")
    strict_length: bool = Field(True, description="Whether to skip shorter episodes.")

    def describe(self, where: str | None) -> dict[str, Any]:
        """Return the description.

        Raises:
            Refusal: 422: there are both `slice_len` and `num_slices`, or neither.
        """
        if (self.slice_len is None) == (self.num_slices is None):
            raise Refusal(422, f"sampler {self.kind!r} takes either slice_len or num_slices")
        return super().describe(where)


class _ByPriority(_Described):
    """Samplers with probabilities that follow priorities."""

    alpha: float = Field(0.6, ge=0, le=10, description="Exponent of priorities; 0: uniform.")
    beta: float = Field(0.4, ge=0, le=10, description="Exponent of `priority_weight`; 1: no bias.")
    eps: float = Field(1e-8, ge=0, le=1, description="Added to priorities, so that 0 can be drawn.")


class _InPasses(_Described):
    """Samplers that draw everything once per pass."""

    shuffle: bool = Field(True, description="Whether the order is random.")
    drop_last: bool = Field(False, description="Whether to skip a smaller last batch.")


class Uniform(_Described):
    """Draw every row with the same probability."""

    kind: Literal["uniform"] = Field(default="uniform", description="Kind of the sampler.")


class Prioritized(_ByPriority):
    """Draw rows with probabilities that follow priorities (Schaul et al. 2016)."""

    kind: Literal["prioritized"] = Field(description="Kind of the sampler.")


class Slices(_Sliced):
    """Draw slices: consecutive steps of one episode each."""

    kind: Literal["slices"] = Field(description="Kind of the sampler.")
    by: Literal["trajectory", "start"] = Field(
        "trajectory", description="What has equal probability: every episode, or every start of a slice."
    )


class PrioritizedSlices(_Sliced, _ByPriority):
    """Draw slices; the probability of their first steps follows priorities."""

    kind: Literal["prioritized_slices"] = Field(description="Kind of the sampler.")


class Recent(_Described):
    """Draw newer rows with a higher probability."""

    kind: Literal["recency"] = Field(description="Kind of the sampler.")
    half_life: float | None = Field(None, gt=0, le=1e15, description="Rows after which the chance is halved.")
    newest: int | None = Field(None, ge=1, le=1 << 62, description="Draw only from this many newest rows.")


class WithoutReplacement(_InPasses):
    """Draw every row once per pass."""

    kind: Literal["without_replacement"] = Field(description="Kind of the sampler.")


class SlicesWithoutReplacement(_Sliced, _InPasses):
    """Draw one slice of every trajectory per pass."""

    kind: Literal["slices_without_replacement"] = Field(description="Kind of the sampler.")


class StreamingSlices(_Described):
    """Draw each slice once, the new ones first."""

    kind: Literal["streaming_slices"] = Field(description="Kind of the sampler.")
    slice_len: Rows = Field(description="Steps of a slice.")
    strict_length: bool = Field(True, description="Whether to skip shorter episodes.")

    def describe(self, where: str | None) -> dict[str, Any]:
        """Return the description.

        Raises:
            Refusal: 422: there is a condition.
        """
        if where is not None:
            raise Refusal(422, "streaming_slices does not take where: leave it out")
        return super().describe(where)


class Consuming(_Described):
    """Draw every row `max_sample_count` times, counted by the store over all clients."""

    kind: Literal["consuming"] = Field(description="Kind of the sampler.")
    max_sample_count: int = Field(1, ge=1, le=1 << 31, description="How often each row is drawn.")


class WholeGroups(_Described):
    """Draw whole complete groups of episodes, each once."""

    kind: Literal["groups"] = Field(description="Kind of the sampler.")
    groups_per_batch: Rows = Field(description="Groups of a batch.")
    order: Literal["oldest", "random"] = Field(
        "oldest", description="Which come first: those with the oldest policy version, or any."
    )
    max_lag: int | None = Field(
        None, ge=0, lt=1 << 62, description="How many versions a group may be behind; null: any number."
    )

    def describe(self, where: str | None) -> dict[str, Any]:
        """Return the description.

        Raises:
            Refusal: 422: there is a condition.
        """
        if where is not None:
            raise Refusal(422, "groups does not take where: leave it out")
        return super().describe(where)


_Stateless = Uniform | Prioritized | Slices | PrioritizedSlices | Recent
_WithState = WithoutReplacement | SlicesWithoutReplacement | StreamingSlices | Consuming
#: Samplers without state from draw to draw.
Spec = Annotated[_Stateless, Field(discriminator="kind")]
#: All samplers.
AnySpec = Annotated[_Stateless | _WithState, Field(discriminator="kind")]
#: The samplers of consumers.
ConsumerSpec = Annotated[_Stateless | _WithState | WholeGroups, Field(discriminator="kind")]


def describe_sampler(sampler: Any, where: str | None) -> str | dict[str, Any] | None:
    """Return a sampler of a request as `LocalMember` takes it: a description, or a name.

    Args:
        sampler: The model of a sampler, a name, or None.
        where: Condition on the rows; None: all rows.

    Raises:
        Refusal: 422: parameters contradict each other.
    """
    return sampler.describe(where) if isinstance(sampler, _Described) else sampler


def make_limited(description: Mapping[str, Any], where: str | None, *, seconds: float) -> Sampler:
    """Return a sampler whose condition is checked and limited.

    Args:
        description: Its `kind` and parameters.
        where: Condition on the rows; None: all rows.
        seconds: Maximum duration of a query of the condition in seconds.

    Raises:
        Refusal: 422: the condition is not allowed.
    """
    if description.get("kind") == "groups":
        return GroupSampler(**{name: value for name, value in description.items() if name != "kind"})
    sampler = make_described(description, None if where is None else check_condition(where))
    limit_condition(sampler, seconds)
    return sampler


class Limited(BaseModel):
    """What the rate limiter of a store counts."""

    rows: int = Field(description="Number of readable rows.")
    inserted: int = Field(description="Number of rows that were ever written.")
    sampled: int = Field(description="Number of rows that were sampled.")
    samples_per_insert: float = Field(description="Average number of samples per row that it permits.")

    @classmethod
    def of(cls, limits: Limits | None) -> Self | None:
        """Return what a member's limiter counts; None if it has none."""
        return None if limits is None else cls(**limits.counts._asdict(), samples_per_insert=limits[1])


def describe_mass(mass: Mass | None, status: Status) -> dict[str, Any]:
    """Return what a batch is drawn from as facts by name; `mass` is None if the sampler has no mass."""
    facts: dict[str, Any] = {"mass": None} if mass is None else {"mass": mass.total}
    if mass is not None:
        facts |= {name: getattr(mass, name) for name in ("rows", "smallest", "beta", "unit", "left")}
    limits = Limited.of(status.limits)
    return facts | {
        "largest_priority": status.largest_priority,
        "limits": None if limits is None else limits.model_dump(),
    }
