"""The paper's tables and figures, run again on real data beside honest baselines."""
