"""Every error that a user can meet, with its HTTP status and OpenAI-style type. One sentence each."""

from __future__ import annotations


class TreadleError(Exception):
    """Base. `message` is one sentence for the person who caused it."""

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after_s: int | None = None  # sent as `Retry-After`

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code


class BadRequest(TreadleError):
    """A request that can never work as sent; `param` names the field."""

    status = 400
    type = "invalid_request_error"


class ContextLengthExceeded(BadRequest):
    """The prompt does not fit the context. Carries both numbers."""

    code = "context_length_exceeded"

    def __init__(
        self, num_tokens: int, context_length: int, *, param: str = "messages", at_least: bool = False
    ) -> None:
        count = f"at least {num_tokens}" if at_least else f"{num_tokens}"
        super().__init__(
            f"This model's context length is {context_length} tokens, but the prompt has {count} tokens.",
            param=param,
        )
        self.num_tokens = num_tokens
        self.context_length = context_length


class BodyTooLarge(TreadleError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"


class NotAuthorised(TreadleError):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class Forbidden(TreadleError):
    """A host name or a web page that this server does not answer to."""

    status = 403
    type = "permission_error"


class NotFound(TreadleError):
    """An unknown model, request id or route."""

    status = 404
    type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(NotFound):
    code = "model_not_found"


class QueueFull(TreadleError):
    """Too many requests wait already; sent with `Retry-After: retry_after_s`."""

    status = 429
    type = "rate_limit_error"
    code = "queue_full"
    retry_after_s = 1


class RateLimited(QueueFull):
    """Too many requests of one key or address within a minute."""

    code = "rate_limit_exceeded"


class NotReady(TreadleError):
    """The model is still loading, failed to load, or the server shuts down."""

    status = 503
    type = "server_error"
    code = "not_ready"
    retry_after_s = 2


class MemoryRefused(TreadleError):
    """The device's memory cannot hold the request. Never phrased as a context problem: agents would compact."""

    status = 503
    type = "insufficient_memory_error"
    code = "insufficient_memory"
    retry_after_s = 5


class Cancelled(TreadleError):
    """The request was ended by the cancel route while its client still listened."""

    status = 499
    type = "request_cancelled"
    code = "request_cancelled"


class TimedOut(TreadleError):
    """The request ran longer than its `timeout` or the server's limit."""

    status = 504
    type = "timeout_error"
    code = "request_timeout"


class Preempted(TreadleError):
    """A newer request ended this one (`on_busy` is `preempt`). Repeating it would end the newer one."""

    status = 409
    type = "request_cancelled"
    code = "request_preempted"


class ModelInUse(TreadleError):
    """A model cannot be unloaded: its requests have not ended in time."""

    status = 409
    type = "invalid_request_error"
    code = "model_in_use"


class ShuttingDown(TreadleError):
    """The server stopped before the request was finished."""

    status = 503
    type = "server_error"
    code = "shutting_down"
    retry_after_s = 5


class EngineFault(TreadleError):
    """A fault inside one sequence (NaN logits, out of memory, a bug). Others go on."""

    code = "engine_fault"


class LoadError(TreadleError):
    """A model that cannot be found, read or built."""

    code = "model_load_failed"


class Unreachable(TreadleError):
    """Another server that this command was to ask."""

    code = "unreachable"


class ConfigError(TreadleError):
    """A bad setting; the message names its key."""

    code = "bad_config"
