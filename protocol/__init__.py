"""What crosses a process boundary: messages, frames, capabilities. No numerics; opens no socket."""
