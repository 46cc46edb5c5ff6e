"""Errors in the OpenAI form: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from engine.config import ConfigError


class ListenError(ConfigError):
    """An address that cannot be listened on. One line: which, why, and what to do."""


class ApiError(Exception):
    """What a caller did wrong, or what went wrong for it.

    Attributes:
        status: HTTP status.
        message: What happened, to what, and what to do.
        kind: The OpenAI API's `type`.
        param: The field that is wrong.
        code: The OpenAI API's `code`, for programs.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code

    @property
    def body(self) -> dict[str, object]:
        """The error as the API writes it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The whole answer."""
        headers = {"www-authenticate": "Bearer"} if self.status == 401 else None
        return json_response(self.body, self.status, headers)


def json_response(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(value), status, headers, "application/json")
