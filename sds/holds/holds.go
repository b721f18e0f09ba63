// Package holds owns what is watched, or asked for, because the names that somebody subscribes to stand for it: files, and services.
//
// It refuses nothing by itself: whoever watches or asks does, and it says so.
package holds

import (
	"log/slog"
	"strings"

	"github.com/chancery-project/chancery/sds/files"
	"github.com/chancery-project/chancery/sds/view"
)

// Services is told which services are asked for.
type Services interface {
	Hold(service string) error
	Drop(service string) // takes back a Hold that gave no error
}

// Holds passes names on.
type Holds struct {
	Files    *files.Watcher
	Services Services // may be nil
	Logger   *slog.Logger
}

// Hold has what a name stands for watched, or asked for, and reports whether Drop should take that back.
func (h *Holds) Hold(name string) bool {
	var err error
	what := "file name refused"
	if ref, ok := view.FileRef(name); ok {
		err = h.Files.Hold(ref)
	} else if service, ok := view.IsService(name); ok && h.Services != nil {
		what = "service name refused; who asks for it waits"
		err = h.Services.Hold(service)
	} else {
		return false
	}
	if err != nil {
		h.Logger.Warn(what, "resource", strings.ToValidUTF8(name[:min(len(name), 256)], ""), "reason", err.Error())
	}
	return err == nil
}

// Drop takes a Hold back.
func (h *Holds) Drop(name string) {
	if ref, ok := view.FileRef(name); ok {
		h.Files.Drop(ref)
	} else if service, ok := view.IsService(name); ok {
		h.Services.Drop(service)
	}
}
