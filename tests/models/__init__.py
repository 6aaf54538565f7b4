"""Small models of ours, for the tests."""
