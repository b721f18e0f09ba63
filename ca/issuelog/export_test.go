package issuelog

// OpenFaulty opens a log whose disk fails as told; see disk.fault.
func OpenFaulty(c Config, fault func(step, name string) (do int, err error)) (*Log, error) {
	return openWith(c, fault)
}

// Kill lets go of the files, as the end of a process does, and does nothing else.
func (l *Log) Kill() { l.closeFiles() }

// Steps are all that can fail.
var Steps = []string{stepJournal, stepTruncate, stepWrite, stepSync, stepTemporary, stepRename}

// ErrDamaged is errDamaged.
var ErrDamaged = errDamaged

// AppendEntry is appendEntry.
var AppendEntry = appendEntry
