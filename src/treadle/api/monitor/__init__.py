"""The monitor page, served by the server itself."""

from treadle.api.monitor.routes import router

__all__ = ["router"]
