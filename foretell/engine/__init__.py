"""Who runs when: requests, forwards, admission, prefix reuse."""
