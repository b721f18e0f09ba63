package keys

// SetWorkFactor makes the passphrase of key files cheap to try, so that tests can make many.
func SetWorkFactor(n int) (undo func()) {
	was := workFactor
	workFactor = n
	return func() { workFactor = was }
}
