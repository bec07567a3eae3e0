"""Whether a request fits the model's context and an empty engine's pages; if not, no wait would help it."""

from common.errors import InvalidRequest, PromptTooLong
from engine.sequence import Sequence
from engine.steps.group import Group
from engine.steps.scheduler import Scheduler


def check_fits(group: Group, scheduler: Scheduler, *, max_model_len: int) -> None:
    """Raise PromptTooLong, or InvalidRequest for beams where the model has none."""
    request, pool = group.request, scheduler.pool
    if request.sampling.has_beams and pool.windows is not None and pool.windows.snapshots:
        # The last token of a prompt is computed again for its candidates; a state cannot go back.
        raise InvalidRequest("a model with recurrent layers has no beam search", field="use_beam_search")
    num_known = len(request.prompt_token_ids) + len(request.output_token_ids)
    if num_known >= max_model_len:
        raise PromptTooLong(f"prompt has {num_known} tokens; this model takes {max_model_len - 1}", field="prompt")
    is_prompt_only = group.holds_after_prefill or request.pooling is not None
    num_new_tokens = 0 if is_prompt_only else request.sampling.max_tokens
    # The last token is never computed: nothing follows it.
    num_tokens = min(len(request.prompt_token_ids) + num_new_tokens, max_model_len)
    num_computed = max(num_known, num_tokens - 1)
    num_blocks = scheduler.pages.num_blocks_for(num_computed)
    if request.sampling.has_beams and num_new_tokens:  # no beam can go on without the others
        num_shared = len(request.prompt_token_ids) // scheduler.limits.block_size
        num_blocks += (request.sampling.n - 1) * max(0, num_blocks - num_shared)
    if num_blocks > pool.num_blocks:
        raise PromptTooLong(
            f"answers of {num_computed} tokens need {num_blocks} KV blocks; this worker has {pool.num_blocks}",
            field="prompt",
        )


def check_windows_fit(leader: Sequence, scheduler: Scheduler) -> None:
    """Raise PromptTooLong for more samples than there are window or state pages for."""
    windows, num_pages = scheduler.pool.windows, scheduler.pages.windows.quota_of(leader)
    if windows is not None and windows.is_scarce and num_pages > windows.num_pages:
        kind = "window" if windows.snapshots is None else "state"
        raise PromptTooLong(
            f"n is {leader.request.sampling.n}, which needs {num_pages} {kind} pages; this worker has"
            f" {windows.num_pages}",
            field="n",
        )
