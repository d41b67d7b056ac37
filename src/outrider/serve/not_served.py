"""What clients of other servers ask for and this one does not do, so that a 404 can say so instead of nothing."""

from __future__ import annotations

_TEXT = "this server writes text"
_STATELESS = "this server keeps no conversations"
_OLLAMA = "point the client at /v1, where OpenAI's API is"

# Paths, with all below them; what they are for; what to do instead, or why not. The longest that fits counts.
NOT_SERVED: dict[str, tuple[str, str]] = {
    "/v1/embeddings": ("embeddings", f"{_TEXT}; use one that serves an embedding model"),
    "/embeddings": ("embeddings", f"{_TEXT}; use one that serves an embedding model"),
    "/embed": ("embeddings", f"{_TEXT}; use one that serves an embedding model"),
    "/v1/rerank": ("reranking", f"{_TEXT}; use one that serves a reranking model"),
    "/v2/rerank": ("reranking", f"{_TEXT}; use one that serves a reranking model"),
    "/rerank": ("reranking", f"{_TEXT}; use one that serves a reranking model"),
    "/v1/score": ("scoring of pairs", f"{_TEXT}; use one that serves a reranking model"),
    "/score": ("scoring of pairs", f"{_TEXT}; use one that serves a reranking model"),
    "/pooling": ("pooling", f"{_TEXT}; use one that serves an embedding model"),
    "/classify": ("classification", f"{_TEXT}; a `choice` in structured_outputs can classify"),
    "/v1/audio": ("audio", _TEXT),
    "/v1/realtime": ("audio", _TEXT),
    "/v1/images": ("images", _TEXT),
    "/v1/videos": ("videos", _TEXT),
    "/v1/moderations": ("moderation", f"{_TEXT}; a `choice` in structured_outputs can classify"),
    "/v1/uploads": ("uploads in parts", "send the whole file to /v1/files"),
    "/v1/messages/batches": ("Anthropic's batches", "use /v1/files and /v1/batches, OpenAI's"),
    "/v1/assistants": ("assistants", f"{_STATELESS}; send the whole conversation to /v1/chat/completions"),
    "/v1/threads": ("threads", f"{_STATELESS}; send the whole conversation to /v1/chat/completions"),
    "/v1/vector_stores": ("vector stores", _STATELESS),
    "/v1/fine_tuning": ("training", "see `outrider distill --help` for drafters"),
    "/v1/complete": ("Anthropic's text completions", "use /v1/messages"),
    "/api/embed": ("embeddings", f"{_TEXT}; use one that serves an embedding model"),
    "/api/embeddings": ("embeddings", f"{_TEXT}; use one that serves an embedding model"),
    "/api": ("Ollama's own API", _OLLAMA),
}


def not_served(path: str) -> str | None:
    """Why there is nothing at this path, where that is known."""
    parts = path.rstrip("/").split("/")
    for size in range(len(parts), 1, -1):
        if found := NOT_SERVED.get("/".join(parts[:size])):
            return f"{found[0]}: not done here; {found[1]}"
    return None
