"""What a call is (calls), how ranks compare it, the contract of a backend, streams, pools, settings, and who is lost."""
