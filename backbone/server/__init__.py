"""The HTTP side of `backbone serve`: OpenAI's API, what operators look at, and the private endpoints of our commands.

An ASGI application on starlette and uvicorn (extra `serve`); it knows the engine only by the `scheduler`.
"""
