export PATH={BIN}:"$PATH"
{EXPORTS}
