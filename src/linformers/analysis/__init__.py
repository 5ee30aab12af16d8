"""What the paper says about attention, asked of any model: its spectrum, the theorems, and which k it needs."""
