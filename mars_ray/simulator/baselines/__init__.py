"""What others do, as policies of the same simulator."""
