"""Publishers: operations sent to a server's stream."""
