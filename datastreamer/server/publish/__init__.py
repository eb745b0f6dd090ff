"""The server's side of publishing: lease, policy, session, commits."""
