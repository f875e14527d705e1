"""What proposes a tree of draft tokens for the next step."""
