"""What crosses a process boundary: messages, frames, what a worker says of itself. No numerics; opens no socket."""

PROTOCOL_VERSION = 2
