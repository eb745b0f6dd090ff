"""Publishing into the stream of another process: messages, and the publisher's side."""
