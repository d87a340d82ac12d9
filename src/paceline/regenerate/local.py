"""Answers by the target in this process: batches of conversations, one turn of each at a time."""

from __future__ import annotations

from paceline.errors import DataError
from paceline.regenerate.loop import ChatTokenizer, OpenConversation, RegenerateSettings, ServerReply, prompt_tokens
from paceline.types import GenerateAnswers


class LocalAnswers:
    """Answers batches of conversations with a function that answers tokenized prompts.

    Args:
        generate: answers tokenized prompts.
        tokenizer: of the target, with a chat template.
        settings: of the answers.
        batch_size: conversations answered side by side.

    Raises:
        DataError: a batch size below 1.
    """

    def __init__(
        self, generate: GenerateAnswers, tokenizer: ChatTokenizer, settings: RegenerateSettings, batch_size: int = 16
    ) -> None:
        if batch_size < 1:
            raise DataError(f"regenerate: batch_size is {batch_size}; it must be at least 1")
        self.num_open = batch_size
        self.retries = 0
        self._generate = generate
        self._tokenizer = tokenizer
        self._settings = settings
        self._waiting: list[OpenConversation] = []

    def submit(self, conversation: OpenConversation) -> None:
        """Ask for the next answer of a conversation."""
        self._waiting.append(conversation)

    def collect(self) -> list[tuple[OpenConversation, ServerReply | str]]:
        """Answer all that wait, as one batch."""
        waiting, self._waiting = self._waiting, []
        found: list[tuple[OpenConversation, ServerReply | str]] = []
        asked: list[tuple[OpenConversation, list[int]]] = []
        for conversation in waiting:
            try:
                asked.append((conversation, prompt_tokens(conversation, self._tokenizer, self._settings)))
            except DataError as error:
                found.append((conversation, str(error)))
        answers = self._generate([prompt for _, prompt in asked], self._settings.sampling) if asked else []
        for (conversation, _), answer in zip(asked, answers, strict=True):
            ids = list(answer.ids)
            # Special tokens are kept: they are part of what the target wrote.
            text = self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            turn = {"role": "assistant", "content": text, "token_ids": ids}
            found.append((conversation, ServerReply(turn, len(ids), answer.finish_reason)))
        return found

    def close(self) -> list[tuple[OpenConversation, ServerReply | str]]:
        """Nothing is under way between two batches."""
        return []
