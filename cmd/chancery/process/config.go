package process

import (
	"encoding/json/jsontext"
	"encoding/json/v2"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"reflect"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// maxConfig bounds a config file, in bytes.
const maxConfig = 1 << 20

// ReadConfig returns the bytes of a config file.
func ReadConfig(path string) ([]byte, error) {
	if path == "" {
		return nil, errors.New("no config file given; use -c FILE")
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("reading config: %w", err)
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err != nil {
		return nil, fmt.Errorf("reading config %s: %w", path, err)
	}
	if len(data) > maxConfig {
		return nil, fmt.Errorf("config %s is larger than %d bytes", path, maxConfig)
	}
	return data, nil
}

// DecodeConfig reads YAML into a struct with json tags, strictly: a field that is unknown, also by its case alone, or
// that occurs twice is an error. Errors name the field by its path, such as clusters[0].issuer, and what would be right.
func DecodeConfig(data []byte, into any) error {
	if err := oneDocument(data); err != nil {
		return err
	}
	doc, err := yaml.YAMLToJSONStrict(data)
	if err != nil {
		return errors.New(strings.TrimSpace(yamlWords.Replace(err.Error())))
	}
	err = json.Unmarshal(doc, into, json.RejectUnknownMembers(true))
	if e, ok := errors.AsType[*json.SemanticError](err); ok {
		return explain(e)
	}
	return err
}

// oneDocument refuses a file with more than one YAML document: the parser reads the first and passes over the rest.
func oneDocument(data []byte) error {
	content, ended := false, false
	for i, line := range strings.Split(string(data), "\n") {
		line = strings.TrimRight(line, " \t\r")
		if line == "---" || line == "..." || strings.HasPrefix(line, "--- ") { // wherever it stands, it ends what was before
			ended = content
			line = line[3:]
		}
		switch line = strings.TrimSpace(line); {
		case line == "" || line[0] == '#' || line[0] == '%' && !content:
		case ended:
			return fmt.Errorf("line %d: a second YAML document begins; there should be one only", i+1)
		default:
			content = true
		}
	}
	return nil
}

// yamlWords turns an error of the YAML parser into one line in words of the file.
var yamlWords = strings.NewReplacer("yaml: ", "", "unmarshal errors:", "", "\n  ", " ", " already set in map", " occurs twice")

// explain says an error of the decoder in words of the file.
func explain(e *json.SemanticError) error {
	field := fieldPath(e.JSONPointer)
	switch {
	case errors.Is(e, json.ErrUnknownName):
		return fmt.Errorf("there is no field %q; known are %s", field, strings.Join(fieldNames(e.GoType), ", "))
	case field == "":
		return fmt.Errorf("it should hold fields, such as %s", strings.Join(fieldNames(e.GoType), ", "))
	}
	return fmt.Errorf("%s should be %s", field, kindName(e.GoType))
}

// fieldPath turns /clusters/0/issuer into clusters[0].issuer.
func fieldPath(p jsontext.Pointer) string {
	var b strings.Builder
	for token := range p.Tokens() {
		switch _, err := strconv.Atoi(token); {
		case err == nil:
			fmt.Fprintf(&b, "[%s]", token)
		case b.Len() > 0:
			b.WriteString("." + token)
		default:
			b.WriteString(token)
		}
	}
	return b.String()
}

func fieldNames(t reflect.Type) []string {
	var names []string
	if t == nil || t.Kind() != reflect.Struct {
		return nil
	}
	for f := range t.Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" {
			names = append(names, name)
		}
	}
	return names
}

func kindName(t reflect.Type) string {
	if t == nil {
		return "something else"
	}
	switch t.Kind() {
	case reflect.String:
		return "text; put it in quotes if it looks like a number"
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	case reflect.Uint32:
		return "a whole number from 0"
	case reflect.Float64:
		return "a number"
	case reflect.Slice:
		return "a list, such as [a, b]"
	case reflect.Struct:
		return "a group of fields, such as " + strings.Join(fieldNames(t), ", ")
	}
	return "of type " + t.String()
}

// SetDefault sets a string that is empty.
func SetDefault(s *string, def string) {
	if *s == "" {
		*s = def
	}
}

// Absolute makes paths absolute that are set: relative ones count from the folder of the config file.
func Absolute(file string, paths ...*string) error {
	dir, err := filepath.Abs(filepath.Dir(file))
	if err != nil {
		return fmt.Errorf("finding the folder of %s: %w", file, err)
	}
	for _, p := range paths {
		if *p != "" && !filepath.IsAbs(*p) {
			*p = filepath.Join(dir, *p)
		}
	}
	return nil
}

// File is a field of a config file that names a file or folder, and its value.
type File struct{ Field, Path string }

// CheckDistinct refuses a file that is written and has another use besides: each would destroy the other's content.
func CheckDistinct(written, read []File) error {
	taken := map[string]string{}
	for _, f := range written {
		if f.Path == "" {
			continue
		}
		path := filepath.Clean(f.Path)
		if other, twice := taken[path]; twice {
			return fmt.Errorf("%s and %s are both %s; each needs its own", other, f.Field, path)
		}
		taken[path] = f.Field
	}
	for _, f := range read {
		if other, twice := taken[filepath.Clean(f.Path)]; twice && f.Path != "" {
			return fmt.Errorf("%s, which is written, and %s are both %s; each needs its own", other, f.Field, filepath.Clean(f.Path))
		}
	}
	return nil
}

// Duration reads a field that holds a duration which is not negative; empty gives 0.
func Duration(field, s string) (time.Duration, error) {
	if s == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, fmt.Errorf("%s: %q is not a duration; write it like 90s, 15m or 24h", field, s)
	}
	if d < 0 {
		return 0, fmt.Errorf("%s: %s is negative; write it like 90s, 15m or 24h", field, s)
	}
	return d, nil
}

// CheckAddress checks a field that holds host:port.
func CheckAddress(field, addr string) error {
	_, port, err := net.SplitHostPort(addr)
	if err == nil {
		_, err = net.LookupPort("tcp", port)
	}
	if err != nil {
		return fmt.Errorf("%s: %q is not host:port, such as 127.0.0.1:8443", field, addr)
	}
	return nil
}
