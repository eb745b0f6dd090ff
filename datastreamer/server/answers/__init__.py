"""Answers to queries: what is read, when, and how answers are sent."""
