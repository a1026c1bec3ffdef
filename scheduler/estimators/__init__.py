"""Estimators of prefill, decode and transfer times: interfaces, analytic models, and regressions on measurements."""
