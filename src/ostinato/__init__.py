"""Capture GPU work into graphs once, and play it again."""
