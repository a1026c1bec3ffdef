"""Who is there, and who may say what. It knows no connection, no block and no daemon."""
