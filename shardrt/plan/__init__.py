"""What training will cost: memory, bytes and time per step, forecast without the machine."""
