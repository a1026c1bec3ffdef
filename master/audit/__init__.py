"""Audit trail of a master: who changed what, from which address, with which result; and refused logins."""
