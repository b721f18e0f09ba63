package issuelog

// Kill lets go of the files, as the end of a process does, and does nothing else.
func (l *Log) Kill() { l.closeFiles() }

// ErrDamaged is errDamaged.
var ErrDamaged = errDamaged

// AppendEntry is appendEntry.
var AppendEntry = appendEntry

// SetBootID makes a log believe that the machine was started under a name.
func SetBootID(id string) (undo func()) {
	was := bootID
	bootID = func() string { return id }
	return func() { bootID = was }
}
