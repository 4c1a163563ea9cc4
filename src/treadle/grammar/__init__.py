"""What a reply must look like: constraints compiled to token masks by llguidance, on the CPU. No MLX."""
