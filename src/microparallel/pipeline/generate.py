"""Greedy generation through a pipeline: for each new token, all tokens so far go through all stages again.

This is the plain way: there is no cache of keys and values, so n tokens cost n forwards of growing length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from microparallel.errors import UsageError

Tokens = dict[str, torch.Tensor]


class Prompt:
    """The tokens so far of a batch of prompts, in the form that the model takes.

    Args:
        input_ids: the prompts, of one length: shorter ones are padded on the left.
        attention_mask: 0 where a prompt is padded.
        takes: the names of the arguments of the model's forward; none of them if it takes a tensor of tokens.
        start: the token with which a decoder begins, if the model is an encoder-decoder.
    """

    def __init__(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None, takes: frozenset[str], start: int | None
    ) -> None:
        self._takes = takes
        self._prompts = input_ids
        self._mask = attention_mask
        self._decodes = "decoder_input_ids" in takes
        if self._decodes and start is None:
            raise UsageError("generate: this is an encoder-decoder: pass decoder_start_token_id=")
        self.tokens = input_ids.new_full((len(input_ids), 1), start or 0) if self._decodes else input_ids

    def batch(self) -> Any:
        """The batch for the next forward."""
        if not self._takes:
            return self.tokens
        if self._decodes:
            masked = {} if self._mask is None else {"attention_mask": self._mask}
            return {"input_ids": self._prompts, **masked, "decoder_input_ids": self.tokens}
        if self._mask is None:
            return {"input_ids": self.tokens}
        new = self.tokens.shape[1] - self._mask.shape[1]
        mask = torch.cat([self._mask, self._mask.new_ones(len(self._mask), new)], dim=1)
        batch = {"input_ids": self.tokens, "attention_mask": mask}
        if "position_ids" in self._takes:  # padding has no position
            batch["position_ids"] = (mask.long().cumsum(1) - 1).clamp(min=0)
        return batch


def generate(
    prompt: Prompt,
    most: int,
    next_logits: Callable[[Any], torch.Tensor | None],
    agree: Callable[[torch.Tensor], torch.Tensor],
    eos_token_id: int | None,
    pad_token_id: int,
) -> torch.Tensor:
    """Append the likeliest token to each sequence, again and again; every rank of a pipeline does this together.

    Args:
        prompt: the tokens so far.
        most: how many tokens to append.
        next_logits: runs a batch through the pipeline; returns logits on the rank with the last stage, else None.
        agree: copies the tokens that the rank with the last stage found to all ranks.
        eos_token_id: a sequence ends with this token.
        pad_token_id: follows in a sequence that has ended.
    """
    ended = torch.zeros(len(prompt.tokens), dtype=torch.bool)
    for _ in range(most):
        logits = next_logits(prompt.batch())
        found = torch.zeros(len(prompt.tokens), dtype=torch.int64)
        if logits is not None:
            found = logits[:, -1].argmax(-1).cpu()
        found = agree(found).to(prompt.tokens.device)
        if eos_token_id is not None:
            found = torch.where(ended.to(found.device), pad_token_id, found)
            ended = ended | (found == eos_token_id).cpu()
        prompt.tokens = torch.cat([prompt.tokens, found[:, None].to(prompt.tokens.dtype)], dim=1)
        if ended.all():
            break
    return prompt.tokens
